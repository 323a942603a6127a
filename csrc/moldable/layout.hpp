// Which sequences are split for certain, and over which ranks: the groups that a search starts from.
#pragma once

#include <vector>

#include "moldable/group.hpp"

namespace knapformer {

struct LayoutSettings {
  double target_s;       // makespan aimed at
  double anchor_share;   // sequences with more work than this share of the target are anchors
  double size_share;     // an anchor's group is the smallest that would be done within this share of the target
};

struct AnchorSize {
  int32_t sequence;
  int32_t ranks;
};

// Seconds that one exchange-and-back of the sequence takes on a rank when it is split evenly over `ranks` ranks of as few
// nodes as possible.
double even_communication_s(const Problem& problem, int32_t sequence, int32_t ranks, int32_t node_size);

// Numbered steps:
//   1. Anchors: sequences heavier than a share of the target, heaviest first.
//   2. Group size: of the sizes whose work per rank and communication meet the (scaled) target, the one with the least rank
//      time; the fastest size where none meets it.
std::vector<AnchorSize> size_anchors(const Problem& problem, const LayoutSettings& settings);

//   3. Ranks, largest groups first: the node that it fills best; else equal parts of as few nodes as have room; else whatever
//      is free. An anchor that finds too little joins the group that stays lowest.
//   4. Every rank left over is a group of its own.
std::vector<Group> lay_out(const Problem& problem, std::vector<AnchorSize> sizes);

}  // namespace knapformer
