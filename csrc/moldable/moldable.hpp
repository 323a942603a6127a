#pragma once

#include "problem.hpp"

namespace knapformer {

// Placement made for each step: long sequences over just enough ranks, short ones whole, shares uneven where that levels the
// load. Keeps the caps, whose sum must hold all tokens. Never worse than home, whole, ulysses or uniform power-of-two bags,
// each where it keeps the caps.
PlanColumns plan_moldable(const Problem& problem);

}  // namespace knapformer
