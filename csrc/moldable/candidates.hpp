// Which groups a search may start from, and what each choice promises.
#pragma once

#include <map>
#include <vector>

#include "moldable/group.hpp"
#include "moldable/layout.hpp"

namespace knapformer {

// Anchors' group sizes with what they promise before any filler is placed.
struct Candidate {
  std::vector<AnchorSize> sizes;
  int32_t container = 1;
  std::vector<Group> groups;
  std::vector<double> overhead_s;  // (groups) rank time beyond work, anchors alone
  double promise_s = 0.0;
  size_t slowest = 0;      // group
  bool is_packed = false;  // the promise is that of fillers packed under caps, which settling often beats
};

// Numbered steps:
//   1. Layouts for several targets and scales (layout.hpp), each distinct one once, also with groups of whole nodes.
//   2. What each promises: the makespan at which its groups, anchors solved alone and their overhead kept, would hold all fillers
//      if those were a liquid. Sizes of the slowest or costliest anchors are changed by one while the promise falls.
class Candidates {
 public:
  // `effort`: 1 for small steps, less for large ones.
  Candidates(const Problem& problem, double effort);

  // The ranks per group for the ranks that no anchor took: single ranks, and in small steps also pairs, fours and nodes.
  std::vector<int32_t> containers() const;
  // The candidates with such groups, best promise first.
  std::vector<Candidate> of(int32_t container);

 private:
  double expected_makespan() const;
  Candidate promise(std::vector<AnchorSize> sizes, int32_t container);
  double alone_s(const Group& group);
  double fill_level(Candidate& layout) const;
  double heaviest_filler_s(const std::vector<AnchorSize>& anchors) const;
  void climb(std::vector<Candidate>& layouts);

  const Problem& p_;
  GroupSolver solver_;
  double effort_;
  bool equal_ranks_;                                // speeds and caps
  std::map<std::vector<int32_t>, double> alone_s_;  // makespans of groups without fillers, of this step
};

double anchor_work_s(const Problem& problem, const Group& group);

// Bins that hold their groups' anchors and overhead.
std::vector<Bin> open_bins(const Problem& problem, const std::vector<Group>& groups, const std::vector<double>& overhead_s);

// The sequences that are no anchors, heaviest first.
std::vector<Item> fillers_of(const Problem& problem, const std::vector<Group>& groups);

}  // namespace knapformer
