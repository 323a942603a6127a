#pragma once

#include <vector>

#include "problem.hpp"

namespace knapformer {

// The phase "home" (docs/planning.md): exchanges what the cost model cannot tell apart so that fewer tokens leave home when a step is
// routed. The makespan stays.
//   Stays. The tokens that rank i of the plan would keep if it became rank r. Whole sequences count by length, because equal lengths
//      are interchangeable. Others count by id.
//   Names. Nodes with equal ranks are matched so that the most tokens stay in their home node. Then equal ranks inside matched nodes
//      are matched so that the most tokens stay on their home rank.
//   Equal sequences. Among whole sequences of equal length, each rank takes those that are at home there.
void keep_home(const Problem& problem, std::vector<Placement>& placements);

// The permutation of the most value: the column of each row. `value` is (n, n), row after row. A value below 0 forbids the pair.
// Exact up to `kExactAssignment` rows, greedy above.
constexpr size_t kExactAssignment = 128;
std::vector<size_t> best_assignment(const std::vector<double>& value, size_t n);

}  // namespace knapformer
