// KnapFormer's greedy (arXiv 2508.06001), in each balancing group:
//   Bags lie over consecutive ranks, the smallest first.
//   Sequences are placed heaviest first. Equal ones go by id.
//   A bag can hold a sequence if mean work per rank × bag size is at least its work, and the sequence has a token for each rank.
//   The sequence goes to the least occupied bag that can hold it. If none can, it goes to the least occupied of the largest bags.
//   A bag's occupancy is its work over (mean work per rank × bag size). Of equally occupied bags the first is taken.
#include <algorithm>
#include <numeric>

#include "simple_planners.hpp"

namespace knapformer {
namespace {

struct Bags {
  std::vector<int32_t> size, first_rank;
  std::vector<double> occupancy;
};

int32_t least_occupied(const Bags& bags, double mean_work, double work, int64_t length) {
  int32_t best = -1, best_largest = -1;
  for (int32_t b = 0; b < static_cast<int32_t>(bags.size.size()); ++b) {
    const bool holds = mean_work * bags.size[b] >= work && length >= bags.size[b];
    if (holds && (best < 0 || bags.occupancy[b] < bags.occupancy[best])) best = b;
    const bool largest = bags.size[b] == bags.size.back();
    if (largest && (best_largest < 0 || bags.occupancy[b] < bags.occupancy[best_largest])) best_largest = b;
  }
  return best >= 0 ? best : best_largest;
}

}  // namespace

BagChoice choose_bags(const Problem& problem, const std::vector<int32_t>& bag_sizes) {
  const int32_t group_ranks = std::accumulate(bag_sizes.begin(), bag_sizes.end(), 0);
  const int32_t num_groups = problem.num_ranks / group_ranks;
  std::vector<Bags> groups(num_groups);
  std::vector<double> mean_work(num_groups, 0.0);
  for (int32_t g = 0; g < num_groups; ++g) {
    groups[g].size = bag_sizes;
    groups[g].occupancy.assign(bag_sizes.size(), 0.0);
    int32_t at = g * group_ranks;
    for (int32_t size : bag_sizes) {
      groups[g].first_rank.push_back(at);
      at += size;
    }
  }
  for (int32_t s = 0; s < problem.num_sequences(); ++s) mean_work[problem.homes[s] / group_ranks] += problem.work_s[s] / group_ranks;
  BagChoice choice{std::vector<int32_t>(problem.lengths.size()), std::vector<int32_t>(problem.lengths.size())};
  for (int32_t s : problem.heaviest_first) {
    const int32_t g = problem.homes[s] / group_ranks;
    auto& bags = groups[g];
    const int32_t b = least_occupied(bags, mean_work[g], problem.work_s[s], problem.lengths[s]);
    if (problem.work_s[s] > 0) bags.occupancy[b] += problem.work_s[s] / (mean_work[g] * bags.size[b]);
    choice.first_rank[s] = bags.first_rank[b];
    choice.size[s] = bags.size[b];
  }
  return choice;
}

PlanColumns plan_bags(const Problem& problem, const std::vector<int32_t>& bag_sizes) {
  const BagChoice choice = choose_bags(problem, bag_sizes);
  PlanColumns plan;
  for (int32_t s = 0; s < problem.num_sequences(); ++s) plan.add_even(problem, s, choice.first_rank[s], choice.size[s]);
  return plan;
}

}  // namespace knapformer
