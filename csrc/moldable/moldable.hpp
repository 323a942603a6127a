#pragma once

#include "problem.hpp"

namespace knapformer {

// The planner `moldable` chooses the placement anew for each step: long sequences over just enough ranks, short ones whole, and
// uneven shares where these level the load. It keeps the caps, which together must hold all tokens. It is never worse than home,
// whole, ulysses or uniform bags of 2^k ranks, each where it keeps the caps.
PlanColumns plan_moldable(const Problem& problem);

class Contest;

// Its phases from "whole" to "contest", for a problem of all ranks, of the first of them or of other links.
void compete(const Problem& problem, Contest& contest);

}  // namespace knapformer
