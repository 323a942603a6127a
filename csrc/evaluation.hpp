// What a plan costs under the model of DESIGN section 4.
#pragma once

#include <vector>

#include "problem.hpp"

namespace knapformer {

struct Evaluation {
  double makespan_s = 0.0;
  double bytes = 0.0;  // exchanged by one layer's attention in the forward pass
  int64_t num_split = 0;
  int64_t num_meetings = 0;      // distinct rank sets of split sequences
  int64_t moved_tokens = 0;      // tokens that leave their home rank
  std::vector<double> linear_s, attention_s, communication_s;  // (N,) of each rank
  std::vector<int64_t> tokens;                                 // (N,)
};

Evaluation evaluate(const Problem& problem, const PlanView& plan);

}  // namespace knapformer
