// Searching for the groups and what goes into them.
#pragma once

#include <vector>

#include "moldable/candidates.hpp"
#include "moldable/group.hpp"

namespace knapformer {

// Groups with their fillers. A bin's level is its group's makespan as last solved.
struct Grouping {
  std::vector<Group> groups;
  std::vector<Bin> bins;  // (groups)
  double makespan_s() const;
};

class Search {
 public:
  explicit Search(const Problem& problem);

  // The best grouping found from several layouts.
  Grouping run();
  std::vector<Placement> place(const Grouping& grouping);

 private:
  Grouping settle(const Candidate& layout, double best_s);
  void fill(Grouping& grouping, const std::vector<double>& overhead_s);
  void house(Grouping& grouping, const std::vector<Item>& left);
  void solve(Grouping& grouping, size_t k);

  void improve(Grouping& grouping, int steps);
  bool exchange_items(Grouping& grouping, Levels& levels);
  bool merge_groups(Grouping& grouping, const Levels& levels);
  void merge(Grouping& grouping, size_t into, size_t from) const;

  // Caps that just fit, or exchanges that cost nothing, make groups of hundreds of ranks, which are slow to solve.
  bool is_tired() const { return solver_.work() > most_work_; }

  const Problem& p_;
  GroupSolver solver_;
  size_t most_work_;
  double effort_;  // 1 for small steps, less for large ones
  Candidates candidates_;
};

}  // namespace knapformer
