#include "moldable/layout.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace knapformer {
namespace {

int32_t group_size(const Problem& problem, int32_t s, double target_s, int32_t node_size) {
  const double mean_speed = problem.total_speed / problem.num_ranks;
  const auto most = static_cast<int32_t>(std::min<int64_t>(problem.num_ranks, std::max<int64_t>(problem.lengths[s], 1)));
  const auto least = static_cast<int32_t>(std::min<double>(most, std::max(1.0, std::floor(problem.work_s[s] / (mean_speed * target_s)))));
  int32_t best = 0, fastest = least;
  double best_time = 0.0, fastest_cost = std::numeric_limits<double>::infinity();
  for (int32_t g = least; g <= std::min(most, 3 * least + 2 * node_size); ++g) {
    const double cost = problem.work_s[s] / (g * mean_speed) + even_communication_s(problem, s, g, node_size);
    if (cost < fastest_cost) {
      fastest_cost = cost;
      fastest = g;
    }
    if (cost > target_s || (best > 0 && g * cost >= best_time)) continue;
    best = g;
    best_time = g * cost;
  }
  return best > 0 ? best : fastest;
}

// The ranks of each node that no group has yet.
class FreeRanks {
 public:
  explicit FreeRanks(const Problem& problem) : nodes_(problem.num_nodes) {
    for (int32_t r = 0; r < problem.num_ranks; ++r) nodes_[problem.node_index[r]].push_back(r);
    for (auto& node : nodes_) {
      std::stable_sort(node.begin(), node.end(), [&](int32_t a, int32_t b) { return problem.speeds[a] > problem.speeds[b]; });
    }
    left_ = problem.num_ranks;
    for (size_t n = 0; n < nodes_.size(); ++n) by_left_.insert({nodes_[n].size(), n});
  }

  int32_t left() const { return left_; }

  // Up to `count` ranks of the first node that has any.
  std::vector<int32_t> take_chunk(int32_t count) {
    std::vector<int32_t> ranks;
    while (nodes_[first_].empty()) ++first_;
    move_out(first_, std::min(count, static_cast<int32_t>(nodes_[first_].size())), ranks);
    return ranks;
  }

  std::vector<int32_t> take(int32_t count) {
    std::vector<int32_t> ranks;
    for (int32_t parts = 1; parts <= std::min(count, static_cast<int32_t>(nodes_.size())); ++parts) {
      if (take_parts(count, parts, ranks)) return ranks;
    }
    return take_scattered(count);
  }

 private:
  bool take_one(int32_t count, std::vector<int32_t>& ranks) {
    const auto best = by_left_.lower_bound({static_cast<size_t>(count), 0});
    if (best == by_left_.end()) return false;
    move_out(best->second, count, ranks);
    return true;
  }

  // `parts` nodes give equal shares: of the nodes that have that many, those with the fewest left.
  bool take_parts(int32_t count, int32_t parts, std::vector<int32_t>& ranks) {
    if (parts == 1) return take_one(count, ranks);
    const int32_t share = (count + parts - 1) / parts;
    std::vector<size_t> fitting;
    for (auto at = by_left_.lower_bound({static_cast<size_t>(share), 0}); at != by_left_.end(); ++at) {
      fitting.push_back(at->second);
      if (static_cast<int32_t>(fitting.size()) == parts) break;
    }
    if (static_cast<int32_t>(fitting.size()) < parts) return false;
    for (int32_t k = 0; k < parts; ++k) {
      move_out(fitting[k], count * (k + 1) / parts - count * k / parts, ranks);
    }
    return true;
  }

  std::vector<int32_t> take_scattered(int32_t count) {
    std::vector<int32_t> ranks;
    while (count > 0) {
      const size_t n = by_left_.lower_bound({by_left_.rbegin()->first, 0})->second;
      const auto part = std::min(count, static_cast<int32_t>(nodes_[n].size()));
      move_out(n, part, ranks);
      count -= part;
    }
    return ranks;
  }

  void move_out(size_t node, int32_t count, std::vector<int32_t>& ranks) {
    auto& from = nodes_[node];
    by_left_.erase({from.size(), node});
    by_left_.insert({from.size() - static_cast<size_t>(count), node});
    ranks.insert(ranks.end(), from.begin(), from.begin() + count);
    from.erase(from.begin(), from.begin() + count);
    left_ -= count;
  }

  std::vector<std::vector<int32_t>> nodes_;
  std::set<std::pair<size_t, size_t>> by_left_;  // ranks left in a node, and the node
  int32_t left_ = 0;
  size_t first_ = 0;  // no node before it has any left
};

// Which group a further anchor joins: that whose work per rank stays lowest. Groups that have room for the tokens go before those that
// have not.
class Joining {
 public:
  Joining(const Problem& problem, std::vector<Group>& groups) : p_(problem), groups_(groups) {
    for (const auto& group : groups) {
      int64_t room = 0;
      double speed = 0.0;
      for (int32_t s : group.anchors) room -= p_.lengths[s];
      for (int32_t r : group.ranks) {
        room += p_.max_tokens[r];
        speed += p_.speeds[r];
      }
      room_.push_back(room);
      speed_.push_back(speed);
    }
  }

  void join(int32_t sequence) {
    size_t best = 0;
    double lowest = std::numeric_limits<double>::infinity();
    bool best_fits = false;
    for (size_t k = 0; k < groups_.size(); ++k) {
      double work = p_.work_s[sequence];
      for (int32_t s : groups_[k].anchors) work += p_.work_s[s];
      const bool fits = room_[k] >= p_.lengths[sequence];
      if (fits < best_fits || (fits == best_fits && work / speed_[k] >= lowest)) continue;
      best_fits = fits;
      lowest = work / speed_[k];
      best = k;
    }
    groups_[best].anchors.push_back(sequence);
    room_[best] -= p_.lengths[sequence];
  }

 private:
  const Problem& p_;
  std::vector<Group>& groups_;
  std::vector<int64_t> room_;
  std::vector<double> speed_;
};

}  // namespace

int32_t largest_node(const Problem& problem) {
  std::vector<int32_t> count(problem.num_nodes, 0);
  for (int32_t n : problem.node_index) ++count[n];
  return *std::max_element(count.begin(), count.end());
}

double even_communication_s(const Problem& problem, int32_t s, int32_t ranks, int32_t node_size) {
  if (ranks < 2) return 0.0;
  const double g = ranks, parts = std::ceil(g / node_size), near = g / parts;
  const double heads = problem.num_heads / g, touched = std::max(1.0, heads);
  const double per_rank = static_cast<double>(problem.lengths[s]) * (2.0 * touched + 2.0 * heads) * problem.bytes_per_head_token;
  return problem.communication_scale * per_rank *
             ((near - 1.0) / g / problem.intra_bytes_per_s + (g - near) / g / problem.inter_bytes_per_s) +
         problem.communication_scale * problem.latency_s * 2.0 * (g - 1.0);
}

std::vector<AnchorSize> size_anchors(const Problem& problem, const LayoutSettings& settings) {
  const int32_t node_size = largest_node(problem);
  const double bar = settings.target_s * settings.anchor_share * problem.total_speed / problem.num_ranks;
  std::vector<AnchorSize> sizes;
  for (int32_t s : problem.heaviest_first) {
    if (problem.work_s[s] <= bar || problem.lengths[s] < 2) break;
    int32_t ranks = std::max(2, group_size(problem, s, settings.target_s * settings.size_share, node_size));
    if (settings.whole_nodes && ranks > node_size) ranks = std::min(problem.num_ranks, (ranks + node_size - 1) / node_size * node_size);
    sizes.push_back({s, ranks});
  }
  return sizes;
}

std::vector<Group> lay_out(const Problem& problem, std::vector<AnchorSize> sizes, int32_t container) {
  std::stable_sort(sizes.begin(), sizes.end(), [](const AnchorSize& a, const AnchorSize& b) { return a.ranks > b.ranks; });
  FreeRanks free(problem);
  std::vector<Group> groups;
  std::vector<int32_t> joining;
  for (const auto& anchor : sizes) {
    const int32_t wanted = (anchor.ranks + container - 1) / container * container;
    const bool joins = container > 1 && anchor.ranks <= container;
    if (joins || 2 * free.left() < wanted || free.left() == 0) {
      joining.push_back(anchor.sequence);
      continue;
    }
    groups.push_back({free.take(std::min(wanted, free.left())), {anchor.sequence}});
  }
  while (free.left() > 0) groups.push_back({free.take_chunk(container), {}});
  std::sort(joining.begin(), joining.end(), [&](int32_t a, int32_t b) {
    return problem.work_s[a] != problem.work_s[b] ? problem.work_s[a] > problem.work_s[b] : a < b;
  });
  Joining lowest(problem, groups);
  for (int32_t s : joining) lowest.join(s);
  for (auto& group : groups) {
    if (group.ranks.size() < 2) continue;
    std::sort(group.ranks.begin(), group.ranks.end(), [&](int32_t a, int32_t b) {
      return problem.node_index[a] != problem.node_index[b] ? problem.node_index[a] < problem.node_index[b] : a < b;
    });
  }
  return groups;
}

}  // namespace knapformer
