#include <algorithm>
#include <set>

#include "lanes/lanes.hpp"

namespace knapformer {
namespace {

// Ranks by the time that they have left, most first, ties by rank.
using Order = std::set<std::pair<double, int32_t>>;

class Spread {
 public:
  Spread(const Problem& problem, const Target& target) : p_(problem), target_(target), room_(problem.max_tokens) {
    nodes_.resize(static_cast<size_t>(problem.num_nodes));
    node_left_.assign(nodes_.size(), 0.0);
    for (int32_t r = 0; r < problem.num_ranks; ++r) {
      left_.push_back(target.makespan_s * problem.speeds[r]);
      insert(r);
    }
  }

  std::vector<std::vector<Share>> run() {
    std::vector<std::vector<Share>> shares(p_.lengths.size());
    for (int32_t s : p_.heaviest_first) {
      shares[s] = p_.lengths[s] == 0 ? std::vector<Share>{{p_.homes[s], 0.0}} : place(s);
    }
    return shares;
  }

 private:
  std::vector<Share> place(int32_t s) {
    const int32_t whole = rank_for_whole(s);
    std::vector<Share> shares = whole >= 0 ? std::vector<Share>{{whole, p_.work_s[s]}} : split(s);
    for (const auto& x : shares) {
      const double part = x.work_s / p_.work_s[s];
      take(x.rank, x.work_s + exchanged_s(s, part) * p_.speeds[x.rank], part * static_cast<double>(p_.lengths[s]));
    }
    return shares;
  }

  // The rank with the most time left that can take all of it; -1 where there is none.
  int32_t rank_for_whole(int32_t s) const {
    for (const auto& [minus_left, r] : all_) {
      if (-minus_left < p_.work_s[s]) return -1;
      if (room_[r] >= p_.lengths[s]) return r;
    }
    return -1;
  }

  std::vector<Share> split(int32_t s) {
    const int32_t node = node_for(s);
    std::vector<Share> shares;
    double rest = p_.work_s[s];
    for (const auto& [minus_left, r] : node >= 0 ? nodes_[node] : all_) {
      const double most = std::min(usable(r), p_.work_s[s] * static_cast<double>(room_[r]) / static_cast<double>(p_.lengths[s]));
      if (most <= 0.0) continue;
      shares.push_back({r, std::min(most, rest)});
      rest -= shares.back().work_s;
      if (rest <= 0.0) break;
    }
    if (shares.empty()) shares.push_back({all_.begin()->second, 0.0});
    const double whole_target = target_.makespan_s * target_.largest_share;
    if (p_.work_s[s] > whole_target && rest <= 0.0) even_out(s, shares);
    for (auto& x : shares) x.work_s += std::max(rest, 0.0) / static_cast<double>(shares.size());
    return shares;
  }

  // A giant's shares are equal where all of its ranks can take that: none is then the one that the others wait for.
  void even_out(int32_t s, std::vector<Share>& shares) const {
    const double even = p_.work_s[s] / static_cast<double>(shares.size());
    for (const auto& x : shares) {
      if (usable(x.rank) < even) return;
    }
    for (auto& x : shares) x.work_s = even;
  }

  // The node with the most time left, if that is enough for the sequence; -1: it takes ranks of several nodes.
  int32_t node_for(int32_t s) const {
    const auto fullest = std::max_element(node_left_.begin(), node_left_.end());
    const auto node = static_cast<int32_t>(fullest - node_left_.begin());
    double usable_s = 0.0;
    for (const auto& [minus_left, r] : nodes_[node]) usable_s += std::max(0.0, usable(r));
    return usable_s >= p_.work_s[s] ? node : -1;
  }

  double usable(int32_t r) const { return std::min(left_[r], target_.makespan_s * target_.largest_share * p_.speeds[r]); }

  // What the exchange takes of the speed of a rank with such a part of a sequence, seconds: q, k, v and output of the heads that its
  // tokens do not have here, and of the tokens that its heads do not have here.
  double exchanged_s(int32_t s, double part) const {
    const double bytes = 4.0 * static_cast<double>(p_.lengths[s]) * p_.num_heads * p_.bytes_per_head_token * part * (1.0 - part);
    return p_.interference * p_.communication_scale * bytes / p_.intra_bytes_per_s;
  }

  void take(int32_t r, double work_s, double tokens) {
    erase(r);
    left_[r] -= work_s;
    room_[r] -= static_cast<int64_t>(tokens);
    insert(r);
  }

  void insert(int32_t r) {
    all_.insert({-left_[r], r});
    nodes_[p_.node_index[r]].insert({-left_[r], r});
    node_left_[p_.node_index[r]] += left_[r];
  }

  void erase(int32_t r) {
    all_.erase({-left_[r], r});
    nodes_[p_.node_index[r]].erase({-left_[r], r});
    node_left_[p_.node_index[r]] -= left_[r];
  }

  const Problem& p_;
  const Target target_;
  std::vector<int64_t> room_;  // (N,) tokens
  std::vector<double> left_;   // (N,) seconds at speed 1
  Order all_;
  std::vector<Order> nodes_;
  std::vector<double> node_left_;
};

}  // namespace

std::vector<std::vector<Share>> spread(const Problem& problem, const Target& target) { return Spread(problem, target).run(); }

}  // namespace knapformer
