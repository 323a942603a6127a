#pragma once

#include "problem.hpp"

namespace knapformer {

// A makespan that no legal plan can beat: work plus the communication that the sequences too heavy for one rank force.
double tight_bound_s(const Problem& problem);

}  // namespace knapformer
