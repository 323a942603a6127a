// Packing whole sequences into bins: what `whole` does with ranks and `moldable` with groups of ranks.
#pragma once

#include <vector>

#include "problem.hpp"

namespace knapformer {

struct Item {
  int32_t id;  // sequence
  double work_s;
  int64_t tokens;
};

struct Bin {
  double size = 1.0;        // ranks' speeds, summed
  double load_s = 0.0;      // rank-seconds: fixed load, then that of its items too
  int64_t room = kNoCap;    // tokens that still fit
  std::vector<Item> items;  // heaviest first

  double level() const { return load_s / size; }
  void add(const Item& item);
  void remove(size_t position);
};

// Longest processing time first: each item, heaviest first, to the bin of the lowest level that has room (ties by index).
// Returns the items that fit nowhere.
std::vector<Item> pack(std::vector<Bin>& bins, const std::vector<Item>& heaviest_first);

// Moves and swaps between the highest bin and others until its level falls no more, or `steps` are used up.
// `breadth`: how many of the lowest bins are tried.
void refine(std::vector<Bin>& bins, int steps, size_t breadth);

}  // namespace knapformer
