// The planners that moldable is measured against.
#pragma once

#include <optional>

#include "problem.hpp"

namespace knapformer {

// Nothing moves.
PlanColumns plan_home(const Problem& problem);

// Every sequence whole on some rank: heaviest first to the least loaded rank that has room, then moves and swaps; `home`
// where that is better and keeps the caps. Nothing where the caps leave a sequence no rank.
std::optional<PlanColumns> plan_whole(const Problem& problem, bool keep_caps = true);

// The rank of each sequence in that plan.
std::optional<std::vector<int32_t>> choose_whole(const Problem& problem, bool keep_caps);

// Every sequence over all ranks of one node, evenly; heaviest first to the node with the least work per rank.
PlanColumns plan_ulysses(const Problem& problem);

// KnapFormer's fixed bags over consecutive ranks, ascending; a world that is a multiple of their total repeats them, and
// each such group places the sequences that its own ranks loaded.
PlanColumns plan_bags(const Problem& problem, const std::vector<int32_t>& bag_sizes);

// Which bag each sequence gets, and its first rank; the shared first half of plan_bags.
struct BagChoice {
  std::vector<int32_t> first_rank, size;  // (S,)
};
BagChoice choose_bags(const Problem& problem, const std::vector<int32_t>& bag_sizes);

}  // namespace knapformer
