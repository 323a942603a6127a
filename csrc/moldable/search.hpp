// Searching for the groups and what goes into them.
#pragma once

#include <vector>

#include "moldable/group.hpp"
#include "moldable/layout.hpp"

namespace knapformer {

// Groups with their fillers. A bin's level is its group's makespan as last solved.
struct Grouping {
  std::vector<Group> groups;
  std::vector<Bin> bins;  // (groups)
  double makespan_s() const { return bins[highest_bin(bins)].level(); }
};

class Search {
 public:
  explicit Search(const Problem& problem) : p_(problem), solver_(problem), order_(problem.heaviest_first()) {}

  // The best grouping found from several layouts.
  Grouping run();
  std::vector<Placement> place(const Grouping& grouping);

 private:
  struct Candidate {
    std::vector<AnchorSize> sizes;
    Grouping grouping;
    double makespan_s;
  };

  std::vector<std::vector<AnchorSize>> layouts() const;
  double expected_makespan() const;
  Grouping settle(std::vector<Group> groups);
  void fill(Grouping& grouping, const std::vector<double>& overhead_s);
  void house(Grouping& grouping, std::vector<Item> left);
  void solve(Grouping& grouping, size_t k);
  void improve(Grouping& grouping, int steps);
  bool exchange_items(Grouping& grouping, size_t worst);
  bool merge_groups(Grouping& grouping, size_t worst);
  void merge(Grouping& grouping, size_t into, size_t from) const;
  double anchor_work(const Group& group) const;

  const Problem& p_;
  GroupSolver solver_;
  std::vector<int32_t> order_;
};

}  // namespace knapformer
