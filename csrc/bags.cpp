// KnapFormer's greedy (arXiv 2508.06001), in each balancing group:
//   Bags lie over consecutive ranks, the smallest first.
//   Sequences are placed heaviest first. Equal ones go by id.
//   A bag can hold a sequence if mean work per rank × bag size is at least its work, and the sequence has a token for each rank.
//   The sequence goes to the least occupied bag that can hold it. If none can, it goes to the least occupied of the largest bags.
//   A bag's occupancy is its work over (mean work per rank × bag size). Of equally occupied bags the first is taken.
#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "simple_planners.hpp"

namespace knapformer {
namespace {

// The bags of one group, in order of occupancy.
class Bags {
 public:
  Bags(const std::vector<int32_t>& sizes, int32_t first_rank) : size(sizes), occupancy_(sizes.size(), 0.0) {
    for (int32_t b = 0; b < static_cast<int32_t>(sizes.size()); ++b) {
      this->first_rank.push_back(first_rank);
      first_rank += sizes[b];
      if (b == 0 || sizes[b] != sizes[b - 1]) classes_.push_back({sizes[b], {}});
      classes_.back().bags.insert({0.0, b});
    }
  }

  int32_t least_occupied(double mean_work, double work, int64_t length) const {
    std::pair<double, int32_t> best{0.0, -1};
    for (const auto& c : classes_) {
      if (mean_work * c.size < work || length < c.size) continue;
      if (best.second < 0 || *c.bags.begin() < best) best = *c.bags.begin();
    }
    return best.second >= 0 ? best.second : classes_.back().bags.begin()->second;
  }

  void occupy(int32_t bag, double more) {
    auto& bags = std::find_if(classes_.begin(), classes_.end(), [&](const Class& c) { return c.size == size[bag]; })->bags;
    bags.erase({occupancy_[bag], bag});
    occupancy_[bag] += more;
    bags.insert({occupancy_[bag], bag});
  }

  std::vector<int32_t> size, first_rank;

 private:
  struct Class {
    int32_t size;
    std::set<std::pair<double, int32_t>> bags;
  };
  std::vector<Class> classes_;  // smallest first
  std::vector<double> occupancy_;
};

}  // namespace

BagChoice choose_bags(const Problem& problem, const std::vector<int32_t>& bag_sizes) {
  const int32_t group_ranks = std::accumulate(bag_sizes.begin(), bag_sizes.end(), 0);
  const int32_t num_groups = problem.num_ranks / group_ranks;
  std::vector<Bags> groups;
  for (int32_t g = 0; g < num_groups; ++g) groups.emplace_back(bag_sizes, g * group_ranks);
  std::vector<double> mean_work(num_groups, 0.0);
  for (int32_t s = 0; s < problem.num_sequences(); ++s) mean_work[problem.homes[s] / group_ranks] += problem.work_s[s] / group_ranks;
  BagChoice choice{std::vector<int32_t>(problem.lengths.size()), std::vector<int32_t>(problem.lengths.size())};
  for (int32_t s : problem.heaviest_first) {
    const int32_t g = problem.homes[s] / group_ranks;
    auto& bags = groups[g];
    const int32_t b = bags.least_occupied(mean_work[g], problem.work_s[s], problem.lengths[s]);
    if (problem.work_s[s] > 0) bags.occupy(b, problem.work_s[s] / (mean_work[g] * bags.size[b]));
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
