// The phase "layouts" (docs/planning.md): which sequences are split for certain, and over which ranks.
#pragma once

#include <vector>

#include "moldable/group_solver.hpp"

namespace knapformer {

struct LayoutSettings {
  double target_s;       // makespan aimed at
  double anchor_share;   // sequences with more work than this share of the target are anchors
  double size_share;     // an anchor's group should be done within this share of the target
  bool whole_nodes;      // groups larger than a node are rounded up to whole nodes
};

struct AnchorSize {
  int32_t sequence;
  int32_t ranks;
};

// Seconds that both exchanges of the sequence take on a rank when it is split evenly over `ranks` ranks of as few nodes as
// possible.
double even_communication_s(const Problem& problem, int32_t sequence, int32_t ranks, int32_t node_size);

// The anchors are the sequences heavier than a share of the target. They come heaviest first. Of the group sizes at which work per
// rank and communication meet the (scaled) target, an anchor gets the one that costs the least rank time. Where no size meets it,
// the anchor gets the fastest size.
std::vector<AnchorSize> size_anchors(const Problem& problem, const LayoutSettings& settings);

// Ranks for the anchors' groups, largest groups first. A group takes the node that it fills best. If no node has room, it takes
// equal parts of as few nodes as have room, and else whatever is free. Its size is made a multiple of `container`.
// The ranks left over are cut into groups of `container` ranks of one node. Anchors that want no more ranks than that, and those
// for which too few ranks were left, join the group that stays lowest and has room for their tokens.
std::vector<Group> lay_out(const Problem& problem, std::vector<AnchorSize> sizes, int32_t container);

// The most ranks that one node has.
int32_t largest_node(const Problem& problem);

}  // namespace knapformer
