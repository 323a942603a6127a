"""KnapFormer: straggler-free training of Diffusion Transformers on mixed image resolutions and video."""
