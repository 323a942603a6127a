// Packing whole sequences into bins: what `whole` does with ranks and `moldable` with groups of ranks.
#pragma once

#include <set>
#include <utility>
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

// An exchange between two bins: item `give` of the one goes, item `take` of the other (none: -1) comes back.
struct Change {
  double level;  // the higher of the two levels afterwards
  size_t to = 0, give = 0;
  int64_t take = -1;
};

// The best exchange between bins `from` and `to` that ends below `level`; its own level stays at `level` where there is none.
Change best_change(const std::vector<Bin>& bins, size_t from, size_t to, double level);
void apply(std::vector<Bin>& bins, size_t from, const Change& change);

// Bins by level, ties by index.
class Levels {
 public:
  explicit Levels(const std::vector<Bin>& bins);
  void update(const std::vector<Bin>& bins, size_t bin);
  size_t highest() const { return order_.rbegin()->second; }
  std::vector<size_t> lowest(size_t breadth) const;  // without the highest

 private:
  std::set<std::pair<double, size_t>> order_;
  std::vector<double> level_;
};

// Best exchanges between the highest bin and the `breadth` lowest until its level is at most `goal`, falls no more, or
// `steps` are used up.
void refine(std::vector<Bin>& bins, int steps, size_t breadth, double goal);

}  // namespace knapformer
