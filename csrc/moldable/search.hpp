// The phases "packing" and "improving" (docs/planning.md): what goes into the groups of a layout.
#pragma once

#include <vector>

#include "moldable/candidates.hpp"
#include "moldable/group_solver.hpp"

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

  // The best grouping found.
  Grouping run();
  std::vector<Placement> place(const Grouping& grouping);

 private:
  Grouping pack_groups(const Candidate& layout, double best_s);
  void fill(Grouping& grouping, const std::vector<double>& overhead_s);
  void make_room(Grouping& grouping, const std::vector<Item>& left);
  void solve(Grouping& grouping, size_t k);

  void improve(Grouping& grouping, int steps);
  bool exchange_items(Grouping& grouping, Levels& levels);
  bool merge_groups(Grouping& grouping, const Levels& levels);
  void merge(Grouping& grouping, size_t into, size_t from) const;

  // Caps that just fit, or exchanges that cost nothing, make groups of hundreds of ranks, which are slow to solve. Then the search
  // stops early.
  bool is_large() const;
  size_t at_effort(size_t fast, size_t by_default, size_t thorough) const;
  bool is_budget_spent() const { return solver_.steps() > budget_; }

  const Problem& p_;
  GroupSolver solver_;
  size_t budget_;         // steps of the solver
  double tight_s_;         // bound
  double share_of_tries_;  // 1 for small steps, less for large ones
  Candidates candidates_;
};

}  // namespace knapformer
