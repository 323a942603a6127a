// The phase "estimates" (docs/planning.md): which layouts the search may start from, and how good each can be.
#pragma once

#include <map>
#include <vector>

#include "moldable/group_solver.hpp"
#include "moldable/layout.hpp"

namespace knapformer {

// A layout with its estimate, before any filler is placed.
struct Candidate {
  std::vector<AnchorSize> sizes;
  int32_t container = 1;
  std::vector<Group> groups;
  std::vector<double> overhead_s;  // (groups) rank time beyond work, anchors alone
  double estimate_s = 0.0;
  size_t slowest = 0;      // group
  // Whether the estimate packed the fillers one by one because of caps. Packing with the groups solved is often better.
  bool is_packed = false;
};

// Layouts are made for several targets and scales (layout.hpp), also with groups of whole nodes. Each distinct one is kept once.
// A layout's estimate is the makespan that its groups would have if the fillers were a liquid: each group is solved with its
// anchors alone, what it takes beyond their work is its overhead, and the fillers are then poured over all groups to one level.
// From the layout with the best estimate, the groups of the slowest and of the heaviest anchors get 1, 2 or 4 ranks more or 1
// rank less, as long as the estimate falls.
class Candidates {
 public:
  // `share_of_tries`: 1 for small steps, less for large ones.
  Candidates(const Problem& problem, double share_of_tries);

  // The ranks per group for the ranks that no anchor took: single ranks, and in small steps also pairs, fours and nodes.
  std::vector<int32_t> containers() const;
  // The layouts with such groups, best estimate first. `free_small`: sequences that need no more ranks than a container are no anchors
  // of one, but fillers that may be moved from group to group, and that the group solver splits where they do not fit whole.
  std::vector<Candidate> of(int32_t container, bool free_small);

 private:
  double expected_makespan() const;
  Candidate estimate(std::vector<AnchorSize> sizes, int32_t container);
  double alone_s(const Group& group);
  double fill_level(Candidate& layout) const;
  double heaviest_filler_s(const std::vector<AnchorSize>& anchors, int32_t container) const;
  void adjust_sizes(std::vector<Candidate>& layouts);

  const Problem& p_;
  GroupSolver solver_;
  double share_of_tries_;
  bool equal_ranks_;  // all speeds are equal, and all caps
  std::map<std::vector<int32_t>, double> alone_s_;  // makespans of groups without fillers
};

bool same_groups(const std::vector<Group>& a, const std::vector<Group>& b);

double anchor_work_s(const Problem& problem, const Group& group);

// Bins that hold their groups' anchors and overhead.
std::vector<Bin> open_bins(const Problem& problem, const std::vector<Group>& groups, const std::vector<double>& overhead_s);

// The sequences that are no anchors, heaviest first.
std::vector<Item> fillers_of(const Problem& problem, const std::vector<Group>& groups);

}  // namespace knapformer
