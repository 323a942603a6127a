"""Hardware that can be simulated: peak speeds from the vendor, and what of them training is assumed to reach.

Only the peaks are facts. The fractions are assumptions, the same for all devices of a generation; replace them with a
cost file of ``knapformer calibrate`` where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knapformer.errors import ConfigurationError
from knapformer.given.cost import PLAIN_PASSES, RECOMPUTE_PASSES, CostModel, Machine
from knapformer.given.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of node.

    Attributes:
        name: for tables.
        peak_flops_per_s: dense bf16 tensor-core peak of a device.
        memory_bytes: of a device.
        ranks_per_node: devices with fast links among them.
        intra_node_peak_bytes_per_s: link of a device per direction inside a node.
        inter_node_peak_bytes_per_s: its share of the node's network per direction.
        linear_fraction: of the peak in the linear phase, norms and elementwise work included. Assumed.
        attention_fraction: of the peak in fused attention, both passes. Assumed.
        link_fraction: of a link's peak that an all-to-all reaches. Assumed.
        exchange_latency_s: of one all-to-all, launch included. Assumed.
        source: where the peaks are from.
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: float
    intra_node_peak_bytes_per_s: float
    inter_node_peak_bytes_per_s: float
    linear_fraction: float
    attention_fraction: float
    source: str
    ranks_per_node: int = 8
    link_fraction: float = 0.75
    exchange_latency_s: float = 30e-6

    @property
    def gamma(self) -> float:
        """Time per attention FLOP over time per linear-phase FLOP."""
        return self.linear_fraction / self.attention_fraction

    def cost(self, shape: ModelShape, *, recompute: bool = True, **overrides: Any) -> CostModel:
        """The cost of ``shape`` on this hardware in bf16.

        Args:
            shape: the model.
            recompute: blocks are recomputed in backward. An exchange then runs three times for four passes of work
                (forward, recompute, backward), else two times for three.
            overrides: fields of ``CostModel``.
        """
        return CostModel.from_shape(
            shape,
            **{
                "gamma": self.gamma,
                "flops_per_s": self.peak_flops_per_s * self.linear_fraction,
                "pass_factor": RECOMPUTE_PASSES if recompute else PLAIN_PASSES,
                "machine": Machine(
                    ranks_per_node=self.ranks_per_node,
                    intra_node_bytes_per_s=self.intra_node_peak_bytes_per_s * self.link_fraction,
                    inter_node_bytes_per_s=self.inter_node_peak_bytes_per_s * self.link_fraction,
                    communication_scale=3 / 4 if recompute else 2 / 3,
                ),
                **overrides,
            },
        )


HARDWARE = {
    "a100": Hardware(
        name="A100 80 GB SXM, 8 × 200 Gb/s",
        peak_flops_per_s=312e12,
        memory_bytes=80e9,
        intra_node_peak_bytes_per_s=300e9,
        inter_node_peak_bytes_per_s=25e9,
        linear_fraction=0.5,
        attention_fraction=0.6,
        source="NVIDIA A100 data sheet (bf16 312 TFLOP/s dense, NVLink 600 GB/s both ways); DGX A100: 8 × HDR 200 Gb/s",
    ),
    "a800": Hardware(
        name="A800 80 GB SXM, 8 × 200 Gb/s",
        peak_flops_per_s=312e12,
        memory_bytes=80e9,
        intra_node_peak_bytes_per_s=200e9,
        inter_node_peak_bytes_per_s=25e9,
        linear_fraction=0.5,
        attention_fraction=0.6,
        source="NVIDIA A800 data sheet: an A100 with NVLink at 400 GB/s both ways; network as of A100, assumed",
    ),
    "a6000": Hardware(
        name="RTX A6000 48 GB, PCIe, 1 × 200 Gb/s a node",
        peak_flops_per_s=154.8e12,
        memory_bytes=48e9,
        intra_node_peak_bytes_per_s=32e9,
        inter_node_peak_bytes_per_s=25e9 / 8,
        linear_fraction=0.5,
        attention_fraction=0.5,
        source="NVIDIA RTX A6000 data sheet (bf16 154.8 TFLOP/s dense, PCIe 4.0 × 16); the network is assumed",
    ),
    "h100": Hardware(
        name="H100 80 GB SXM, 8 × 400 Gb/s",
        peak_flops_per_s=989.4e12,
        memory_bytes=80e9,
        intra_node_peak_bytes_per_s=450e9,
        inter_node_peak_bytes_per_s=50e9,
        linear_fraction=0.42,
        attention_fraction=0.55,
        source="NVIDIA H100 data sheet (bf16 989 TFLOP/s dense, NVLink 900 GB/s both ways); DGX H100: 8 × NDR 400 Gb/s",
    ),
    "h200": Hardware(
        name="H200 141 GB SXM, 8 × 400 Gb/s",
        peak_flops_per_s=989.4e12,
        memory_bytes=141e9,
        intra_node_peak_bytes_per_s=450e9,
        inter_node_peak_bytes_per_s=50e9,
        linear_fraction=0.42,
        attention_fraction=0.55,
        source="NVIDIA H200 data sheet: an H100 with 141 GB; DGX H200: 8 × NDR 400 Gb/s",
    ),
    "b200": Hardware(
        name="B200 180 GB SXM, 8 × 400 Gb/s",
        peak_flops_per_s=2250e12,
        memory_bytes=180e9,
        intra_node_peak_bytes_per_s=900e9,
        inter_node_peak_bytes_per_s=50e9,
        linear_fraction=0.4,
        attention_fraction=0.5,
        source="NVIDIA DGX B200 data sheet (8 devices: 1440 GB; bf16 2.25 PFLOP/s dense, NVLink 1.8 TB/s; "
        "8 × 400 Gb/s)",
    ),
}
"""By name. Fractions: matrix products of these shapes run at 60 to 70 % of the peak and lose a third to norms and
elementwise work, more on faster devices; fused attention reaches 50 to 60 % over both passes (FlashAttention-2 on A100,
-3 on Hopper)."""


def hardware(name: str) -> Hardware:
    """A known kind of node, whatever the case of its name.

    Raises:
        ConfigurationError: listing the known names.
    """
    found = HARDWARE.get(name.lower())
    if found is None:
        raise ConfigurationError(f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}")
    return found
