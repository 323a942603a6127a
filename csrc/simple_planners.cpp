#include "simple_planners.hpp"

#include <algorithm>
#include <map>

#include "packing.hpp"

namespace knapformer {
namespace {

constexpr int kWholeSteps = 2000;
constexpr size_t kWholeBreadth = 12;
constexpr double kWholeGoal = 5e-5;  // relative distance from the lower bound that is as good as none

PlanColumns whole_plan(const Problem& problem, const std::vector<int32_t>& rank_of) {
  PlanColumns plan;
  for (int32_t s = 0; s < problem.num_sequences(); ++s) plan.add_whole(problem, s, rank_of[s]);
  return plan;
}

std::vector<Bin> rank_bins(const Problem& problem, bool keep_caps) {
  std::vector<Bin> bins(problem.num_ranks);
  for (int32_t r = 0; r < problem.num_ranks; ++r) {
    bins[r].size = problem.speeds[r];
    bins[r].room = keep_caps ? problem.max_tokens[r] : kNoCap;
  }
  return bins;
}

double highest(const std::vector<Bin>& bins) {
  double level = 0.0;
  for (const auto& bin : bins) level = std::max(level, bin.level());
  return level;
}

}  // namespace

PlanColumns plan_home(const Problem& problem) { return whole_plan(problem, problem.homes); }

std::optional<std::vector<int32_t>> choose_whole(const Problem& problem, bool keep_caps) {
  std::vector<Item> items;
  for (int32_t s : problem.heaviest_first) items.push_back({s, problem.work_s[s], problem.lengths[s]});
  auto at_home = rank_bins(problem, keep_caps);
  for (const auto& item : items) at_home[problem.homes[item.id]].add(item);
  const bool home_fits = std::all_of(at_home.begin(), at_home.end(), [](const Bin& bin) { return bin.room >= 0; });
  auto bins = rank_bins(problem, keep_caps);
  const bool packed = pack(bins, items).empty();
  if (!packed && !home_fits) return std::nullopt;
  if (!packed || (home_fits && highest(at_home) <= highest(bins))) bins = std::move(at_home);
  refine(bins, kWholeSteps, kWholeBreadth, problem.lower_bound_s() * (1.0 + kWholeGoal));
  std::vector<int32_t> rank_of(problem.lengths.size());
  for (int32_t r = 0; r < problem.num_ranks; ++r) {
    for (const auto& item : bins[r].items) rank_of[item.id] = r;
  }
  return rank_of;
}

std::optional<PlanColumns> plan_whole(const Problem& problem, bool keep_caps) {
  const auto rank_of = choose_whole(problem, keep_caps);
  return rank_of ? std::optional(whole_plan(problem, *rank_of)) : std::nullopt;
}

PlanColumns plan_ulysses(const Problem& problem) {
  std::vector<std::vector<int32_t>> ranks(problem.num_nodes);
  for (int32_t r = 0; r < problem.num_ranks; ++r) ranks[problem.node_index[r]].push_back(r);
  std::vector<Bin> bins(problem.num_nodes);
  for (int32_t n = 0; n < problem.num_nodes; ++n) bins[n].size = static_cast<double>(ranks[n].size());
  std::vector<Item> items;
  for (int32_t s : problem.heaviest_first) items.push_back({s, problem.work_s[s], 0});
  pack(bins, items);
  std::vector<int32_t> node_of(problem.lengths.size());
  for (int32_t n = 0; n < problem.num_nodes; ++n) {
    for (const auto& item : bins[n].items) node_of[item.id] = n;
  }
  PlanColumns plan;
  for (int32_t s = 0; s < problem.num_sequences(); ++s) {
    const auto& node = ranks[node_of[s]];
    const auto g = static_cast<int64_t>(node.size());
    const int64_t length = problem.lengths[s], heads = problem.num_heads;
    for (int64_t k = 0; k < g; ++k) {
      plan.add_segment(node[k], length * k / g, length * (k + 1) / g);
      plan.add_tile(node[k], static_cast<int32_t>(heads * k / g), static_cast<int32_t>(heads * (k + 1) / g), 0, length);
    }
    plan.end_sequence();
  }
  return plan;
}

}  // namespace knapformer
