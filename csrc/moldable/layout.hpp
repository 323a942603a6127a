// Which sequences are split for certain, and over which ranks: the groups that a search starts from.
#pragma once

#include <vector>

#include "moldable/group.hpp"

namespace knapformer {

struct LayoutSettings {
  double target_s;       // makespan aimed at
  double anchor_share;   // sequences with more work than this share of the target are anchors
  double size_share;     // an anchor's group is the smallest that would be done within this share of the target
  bool whole_nodes;      // groups larger than a node are rounded up to whole nodes
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
//      is free.
//   4. The ranks left over are cut into groups of `container` ranks of one node. Anchors that want no more than that, and those
//      that found too little in 3, join the group that stays lowest and has the token room. A group in 3 is made a multiple of
//      `container`.
std::vector<Group> lay_out(const Problem& problem, std::vector<AnchorSize> sizes, int32_t container);

// The most ranks that one node has.
int32_t largest_node(const Problem& problem);

}  // namespace knapformer
