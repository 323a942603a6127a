#include <algorithm>
#include <cmath>
#include <numeric>

#include "lanes/lanes.hpp"

namespace knapformer {
namespace {

// Integers of the sum `total`, in proportion to `weights`: the largest remainders are rounded up, ties by index.
std::vector<int64_t> apportion(const std::vector<double>& weights, int64_t total) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> whole(weights.size());
  std::vector<std::pair<double, size_t>> remainders;
  int64_t left = total;
  for (size_t i = 0; i < weights.size(); ++i) {
    const double exact = sum > 0 ? weights[i] / sum * static_cast<double>(total) : 0.0;
    whole[i] = static_cast<int64_t>(std::floor(exact));
    remainders.push_back({static_cast<double>(whole[i]) - exact, i});
    left -= whole[i];
  }
  std::sort(remainders.begin(), remainders.end());
  for (size_t k = 0; left > 0; k = (k + 1) % remainders.size(), --left) ++whole[remainders[k].second];
  return whole;
}

class Cut {
 public:
  Cut(const Problem& problem, int32_t sequence, std::vector<Share> shares)
      : p_(problem), s_(sequence), shares_(std::move(shares)), length_(problem.lengths[sequence]) {
    std::sort(shares_.begin(), shares_.end(), [](const Share& a, const Share& b) { return a.rank < b.rank; });
    for (const auto& x : shares_) work_.push_back(x.work_s);
  }

  Placement run(std::vector<int64_t>& room) {
    if (!whole_heads(room)) rows_of_heads();
    Placement placement;
    int64_t at = 0;
    for (size_t i = 0; i < shares_.size(); ++i) {
      if (tokens_[i] > 0) placement.segments.push_back({shares_[i].rank, at, at + tokens_[i]});
      at += tokens_[i];
      room[shares_[i].rank] -= tokens_[i];
      add_tiles(i, placement);
    }
    return placement;
  }

 private:
  // Whether tokens can make up for whole heads.
  bool whole_heads(const std::vector<int64_t>& room) {
    const auto heads = apportion(work_, p_.num_heads);
    const double total = std::accumulate(work_.begin(), work_.end(), 0.0);
    std::vector<double> wanted;
    for (size_t i = 0; i < shares_.size(); ++i) {
      const double work_s = work_[i] / total * p_.work_s[s_];
      const double attention_s = p_.attention_s[s_] * static_cast<double>(heads[i]) / p_.num_heads;
      const double tokens = (work_s - attention_s) / p_.linear_s_per_token;
      if (tokens < -0.5 || tokens > static_cast<double>(room[shares_[i].rank])) return false;
      wanted.push_back(std::max(0.0, tokens));
    }
    tokens_ = apportion(wanted, length_);
    for (int64_t h : heads) end_.push_back((end_.empty() ? 0 : end_.back()) + h * length_);
    return true;
  }

  // Heads × rows as one line, cut in proportion.
  void rows_of_heads() {
    tokens_ = apportion(work_, length_);
    for (int64_t rows : apportion(work_, length_ * p_.num_heads)) end_.push_back((end_.empty() ? 0 : end_.back()) + rows);
  }

  // The part `end_[i - 1]:end_[i]` of the line: rows of a head, whole heads, rows of another.
  void add_tiles(size_t i, Placement& placement) const {
    int64_t at = i == 0 ? 0 : end_[i - 1];
    while (at < end_[i]) {
      const auto head = static_cast<int32_t>(at / length_);
      const int64_t row = at % length_;
      const auto whole = static_cast<int32_t>((end_[i] - at) / length_);
      const int32_t heads = row == 0 && whole > 0 ? whole : 1;
      const int64_t rows = row == 0 && whole > 0 ? length_ : std::min(length_ - row, end_[i] - at);
      placement.tiles.push_back({shares_[i].rank, head, head + heads, row, row + rows});
      at += heads * rows;
    }
  }

  const Problem& p_;
  const int32_t s_;
  std::vector<Share> shares_;
  const int64_t length_;
  std::vector<double> work_;
  std::vector<int64_t> tokens_, end_;
};

}  // namespace

Placement cut(const Problem& problem, int32_t sequence, std::vector<Share> shares, std::vector<int64_t>& room) {
  if (shares.size() == 1) {
    room[shares[0].rank] -= problem.lengths[sequence];
    return whole_on(problem, sequence, shares[0].rank);
  }
  return Cut(problem, sequence, std::move(shares)).run(room);
}

}  // namespace knapformer
