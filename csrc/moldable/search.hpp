// Searching for the groups and what goes into them.
#pragma once

#include <map>
#include <vector>

#include "moldable/group.hpp"
#include "moldable/layout.hpp"

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
  // Anchors' group sizes with what they promise before any filler is placed.
  struct Layout {
    std::vector<AnchorSize> sizes;
    int32_t container = 1;
    std::vector<Group> groups;
    std::vector<double> overhead_s;  // (groups) rank time beyond work, anchors alone
    double promise_s = 0.0;
    size_t slowest = 0;      // group
    bool is_packed = false;  // the promise is that of fillers packed under caps, which settling often beats
  };

  double expected_makespan() const;
  std::vector<Layout> layouts(int32_t container);
  std::vector<int32_t> containers() const;
  Layout promise(std::vector<AnchorSize> sizes, int32_t container);
  double alone_s(const Group& group);
  double fill_level(Layout& layout) const;
  double heaviest_filler_s(const std::vector<AnchorSize>& anchors) const;
  void climb(std::vector<Layout>& layouts);

  std::vector<Bin> open_bins(const std::vector<Group>& groups, const std::vector<double>& overhead_s) const;
  std::vector<Item> fillers(const std::vector<Group>& groups) const;
  Grouping settle(const Layout& layout, double best_s);
  void fill(Grouping& grouping, const std::vector<double>& overhead_s);
  void house(Grouping& grouping, const std::vector<Item>& left);
  void solve(Grouping& grouping, size_t k);

  void improve(Grouping& grouping, int steps);
  bool exchange_items(Grouping& grouping, Levels& levels);
  bool merge_groups(Grouping& grouping, const Levels& levels);
  void merge(Grouping& grouping, size_t into, size_t from) const;
  double anchor_work(const Group& group) const;

  const Problem& p_;
  GroupSolver solver_;
  double effort_;      // 1 for small steps, less for large ones
  bool equal_ranks_;   // speeds and caps
  std::map<std::vector<int32_t>, double> alone_s_;  // makespans of groups without fillers, of this step
};

}  // namespace knapformer
