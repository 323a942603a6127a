#include <algorithm>
#include <array>
#include <map>

#include "lanes/lanes.hpp"

namespace knapformer {
namespace {

// What a sequence brings to one of its ranks, seconds.
struct Part {
  int32_t rank;
  double linear_s = 0, attention_s = 0, communication_s = 0;
  double sum() const { return linear_s + attention_s + communication_s; }
};

class Deal {
 public:
  Deal(const Problem& problem, const PlanView& plan) : p_(problem), v_(plan), lane_(problem.lengths.size(), 0) {
    for (auto& lane : lanes_) lane.assign(static_cast<size_t>(problem.num_ranks), Part{});
    meetings_.resize(static_cast<size_t>(problem.num_ranks));
  }

  std::vector<int8_t> run() {
    std::vector<std::pair<double, int32_t>> split, whole;
    std::vector<std::vector<Part>> parts;
    for (int32_t s = 0; s < v_.num_sequences; ++s) {
      parts.push_back(parts_of(s));
      double largest = 0.0;
      for (const auto& x : parts.back()) largest = std::max(largest, x.sum());
      (parts.back().size() > 1 ? split : whole).push_back({-largest, s});
    }
    if (split.empty()) return {};
    std::sort(split.begin(), split.end());
    std::sort(whole.begin(), whole.end());
    for (const auto& [largest, s] : split) deal_split(s, parts[s]);
    for (const auto& [largest, s] : whole) deal_whole(s, parts[s]);
    return lane_;
  }

 private:
  struct Meeting {
    double linear_s = 0, attention_s = 0, communication_s = 0;  // the largest of its ranks, in its lane
    int8_t lane = 0;
    double sum() const { return linear_s + attention_s + communication_s; }
  };

  std::vector<Part> parts_of(int32_t s) const {
    std::map<int32_t, Part> parts;
    std::map<int32_t, double> tokens, heads;
    const auto length = static_cast<double>(p_.lengths[s]);
    for (int64_t k = v_.segment_offsets[s]; k < v_.segment_offsets[s + 1]; ++k) {
      tokens[v_.segment_rank[k]] += static_cast<double>(v_.segment_end[k] - v_.segment_start[k]) / length;
    }
    for (int64_t k = v_.tile_offsets[s]; k < v_.tile_offsets[s + 1]; ++k) {
      const auto rows = static_cast<double>(v_.tile_query_end[k] - v_.tile_query_start[k]);
      heads[v_.tile_rank[k]] += (v_.tile_head_end[k] - v_.tile_head_start[k]) * rows / length / p_.num_heads;
    }
    for (const auto& [r, part] : tokens) parts[r].linear_s = part * p_.linear_s(s) / p_.speeds[r];
    for (const auto& [r, part] : heads) parts[r].attention_s = part * p_.attention_s[s] / p_.speeds[r];
    std::vector<Part> out;
    for (auto& [r, part] : parts) {
      part.rank = r;
      const double held = tokens.count(r) ? tokens[r] : 0.0, worked = heads.count(r) ? heads[r] : 0.0;
      const double moved = 4.0 * std::max(held * (1 - worked), (1 - held) * worked);  // q, k, v and output
      const double bytes = p_.bytes_per_head_token * p_.num_heads * length * moved;
      part.communication_s = parts.size() > 1 ? p_.communication_scale * bytes / p_.intra_bytes_per_s : 0.0;
      out.push_back(part);
    }
    return out;
  }

  void deal_split(int32_t s, const std::vector<Part>& parts) {
    Meeting best;
    for (int8_t lane : {0, 1}) {
      Meeting meeting;
      meeting.lane = lane;
      for (const auto& x : parts) {
        const Part& load = lanes_[lane][x.rank];
        meeting.linear_s = std::max(meeting.linear_s, load.linear_s + x.linear_s);
        meeting.attention_s = std::max(meeting.attention_s, load.attention_s + x.attention_s);
        meeting.communication_s = std::max(meeting.communication_s, load.communication_s + x.communication_s);
      }
      if (lane == 0 || meeting.sum() < best.sum()) best = meeting;
    }
    lane_[s] = best.lane;
    const auto id = static_cast<int32_t>(all_.size());
    all_.push_back(best);
    for (const auto& x : parts) {
      meetings_[x.rank].push_back(id);
      add(x, best.lane);
    }
  }

  // To the lane whose slowest meeting on this rank stays faster.
  void deal_whole(int32_t s, const std::vector<Part>& parts) {
    if (parts.empty()) return;
    std::array<double, 2> slowest{};
    for (int8_t lane : {0, 1}) {
      const Part& load = lanes_[lane][parts[0].rank];
      for (int32_t id : meetings_[parts[0].rank]) {
        const Meeting& x = all_[id];
        if (x.lane != lane) continue;
        const double linear = std::max(x.linear_s, load.linear_s + parts[0].linear_s);
        const double attention = std::max(x.attention_s, load.attention_s + parts[0].attention_s);
        slowest[lane] = std::max(slowest[lane], linear + attention + x.communication_s);
      }
      slowest[lane] += 1e-6 * (load.linear_s + load.attention_s);  // otherwise to the emptier one
    }
    lane_[s] = slowest[1] < slowest[0];
    add(parts[0], lane_[s]);
  }

  void add(const Part& part, int8_t lane) {
    Part& load = lanes_[lane][part.rank];
    load.linear_s += part.linear_s;
    load.attention_s += part.attention_s;
    load.communication_s += part.communication_s;
    for (int32_t id : meetings_[part.rank]) {
      Meeting& x = all_[id];
      if (x.lane != lane) continue;
      x.linear_s = std::max(x.linear_s, load.linear_s);
      x.attention_s = std::max(x.attention_s, load.attention_s);
      x.communication_s = std::max(x.communication_s, load.communication_s);
    }
  }

  const Problem& p_;
  const PlanView& v_;
  std::vector<int8_t> lane_;
  std::array<std::vector<Part>, 2> lanes_;      // (N,) loads of each lane
  std::vector<Meeting> all_;                    // of split sequences
  std::vector<std::vector<int32_t>> meetings_;  // (N,) those of each rank
};

}  // namespace

std::vector<int8_t> deal(const Problem& problem, const PlanView& plan) { return Deal(problem, plan).run(); }

}  // namespace knapformer
