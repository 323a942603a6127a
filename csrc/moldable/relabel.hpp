#pragma once

#include <vector>

#include "problem.hpp"

namespace knapformer {

// The phase "home" (docs/planning.md): exchanges what the cost model cannot tell apart so that fewer tokens leave home when a step is
// routed. The makespan stays.
//   Stays. The tokens that rank i of the plan would keep if it became rank r. Whole sequences count by length, because equal lengths
//      are interchangeable. Others count by id.
//   Names. Nodes with equal ranks are matched so that the most tokens stay in their home node. Then equal ranks inside matched nodes
//      are matched so that the most tokens stay on their home rank. Above 128 of them the largest values come first.
//   Equal sequences. Among whole sequences of equal length, each rank takes those that are at home there.
void keep_home(const Problem& problem, std::vector<Placement>& placements);

}  // namespace knapformer
