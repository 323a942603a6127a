#pragma once

#include <vector>

#include "problem.hpp"

namespace knapformer {

// Exchanges what the cost model cannot tell apart so that fewer tokens leave home when a step is routed; the makespan stays.
// Numbered steps:
//   1. Tokens that rank i of the plan would keep if it were rank r: whole sequences by length (equal lengths are
//      interchangeable), others by id.
//   2. Nodes of equal ranks are matched so that the most tokens stay in their home node, then equal ranks inside matched
//      nodes so that the most stay on their home rank.
//   3. Among whole sequences of equal length, each rank takes those that are at home there.
void keep_home(const Problem& problem, std::vector<Placement>& placements);

// The permutation of the most value: column of each row. `value` is (n, n), row after row; a value below 0 is not allowed.
// Exact up to `kExactAssignment` rows, greedy above.
constexpr size_t kExactAssignment = 128;
std::vector<size_t> best_assignment(const std::vector<double>& value, size_t n);

}  // namespace knapformer
