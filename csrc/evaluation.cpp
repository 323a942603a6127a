// The evaluator, in four parts:
//   Loads. Each segment adds its tokens to its rank, and each tile its share of heads × rows. Both are divided by the rank's speed.
//   Traffic of each split sequence, before attention (q, k, v) and after it (output), inside and between nodes.
//      k and v go to a rank once for each head that it works on. q and the output go by the query rows of its tiles.
//      Sums over a node stand in for pairs of ranks, so that the cost is linear in segments + tiles.
//   Communication of each rank. For each exchange it is the larger of what the rank sends and what it receives, over the link's
//      bandwidth. Inside and between nodes are added. Each exchange adds the latency once for each rank that it sends to or receives from.
//   Makespan. A rank in no meeting takes linear + attention. A meeting takes the largest linear phase, the largest attention and the
//      largest communication of its ranks.
// With two lanes all of this is taken lane by lane, and a rank takes the linear + attention of both, and the part of its speed that
// the exchanges of both take from it (`interference`).
#include "evaluation.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

namespace knapformer {
namespace {

enum Flow { kBeforeOutNear, kBeforeOutFar, kBeforeInNear, kBeforeInFar, kAfterOutNear, kAfterOutFar, kAfterInNear, kAfterInFar, kFlows };

struct Span {
  int32_t start, end;
};

int64_t union_size(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.start < b.start; });
  int64_t size = 0;
  int32_t at = 0;
  for (const auto& x : spans) {
    if (x.end > std::max(x.start, at)) {
      size += x.end - std::max(x.start, at);
      at = x.end;
    }
  }
  return size;
}

// The ranks that each rank exchanges something with, each counted once.
class Peers {
 public:
  explicit Peers(size_t num_ranks) : of_(num_ranks), checked_(num_ranks, 64) {}

  void add(int32_t a, int32_t b) {
    if (a == b) return;
    add_one(a, b);
    add_one(b, a);
  }

  void clear() {
    for (auto& ranks : of_) ranks.clear();
  }

  size_t count(int32_t r) {
    unite(of_[r]);
    return of_[r].size();
  }

 private:
  static void unite(std::vector<int32_t>& ranks) {
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  }

  // Lists may hold a rank several times, but never twice as many as were different when it was last looked at.
  void add_one(int32_t a, int32_t b) {
    auto& ranks = of_[a];
    ranks.push_back(b);
    if (ranks.size() < checked_[a]) return;
    unite(ranks);
    checked_[a] = std::max<size_t>(64, 2 * ranks.size());
  }

  std::vector<std::vector<int32_t>> of_;
  std::vector<size_t> checked_;
};

class Evaluator {
 public:
  Evaluator(const Problem& problem, const PlanView& plan)
      : p_(problem),
        v_(plan),
        flows_(problem.num_ranks),
        before_peers_(problem.latency_s > 0.0 ? problem.num_ranks : 0),
        after_peers_(problem.latency_s > 0.0 ? problem.num_ranks : 0) {
    const auto n = static_cast<size_t>(problem.num_ranks);
    result_.linear_s.assign(n, 0.0);
    result_.attention_s.assign(n, 0.0);
    result_.communication_s.assign(n, 0.0);
    result_.tokens.assign(n, 0);
    local_.resize(n);
    mark_.assign(n, -1);
    node_.resize(static_cast<size_t>(problem.num_nodes));
  }

  Evaluation run() {
    for (int32_t lane = 0; lane < v_.num_lanes; ++lane) {
      begin_lane();
      for (int32_t s = 0; s < v_.num_sequences; ++s) {
        if (v_.lane_of(s) != lane) continue;
        add_loads(s);
        collect_ranks(s);
        if (ranks_.size() > 1) add_traffic(s);
      }
      end_lane();
    }
    add_ranks();
    return std::move(result_);
  }

 private:
  struct Local {
    int64_t tokens = 0, kv_heads = 0, full_heads = 0;
    std::vector<Span> spans;
  };
  struct NodeSum {
    int64_t tokens = 0, kv_heads = 0, full_heads = 0;
  };

  void begin_lane() {
    const auto n = static_cast<size_t>(p_.num_ranks);
    lane_.linear_s.assign(n, 0.0);
    lane_.attention_s.assign(n, 0.0);
    lane_.communication_s.assign(n, 0.0);
    for (auto& flow : flows_) flow.fill(0.0);
    before_peers_.clear();
    after_peers_.clear();
    meetings_.clear();
  }

  // Loads.
  void add_loads(int32_t s) {
    for (int64_t k = v_.segment_offsets[s]; k < v_.segment_offsets[s + 1]; ++k) {
      const int32_t r = v_.segment_rank[k];
      const int64_t tokens = v_.segment_end[k] - v_.segment_start[k];
      result_.tokens[r] += tokens;
      lane_.linear_s[r] += static_cast<double>(tokens) * p_.linear_s_per_token / p_.speeds[r];
      if (r != p_.homes[s]) result_.moved_tokens += tokens;
    }
    const double area = static_cast<double>(p_.num_heads) * static_cast<double>(p_.lengths[s]);
    for (int64_t k = v_.tile_offsets[s]; k < v_.tile_offsets[s + 1]; ++k) {
      const auto heads = static_cast<double>(v_.tile_head_end[k] - v_.tile_head_start[k]);
      const auto rows = static_cast<double>(v_.tile_query_end[k] - v_.tile_query_start[k]);
      const int32_t r = v_.tile_rank[k];
      lane_.attention_s[r] += p_.attention_s[s] * (heads * rows / area) / p_.speeds[r];
    }
  }

  void touch(int32_t s, int32_t r) {
    if (mark_[r] == s) return;
    mark_[r] = s;
    ranks_.push_back(r);
    local_[r].tokens = local_[r].kv_heads = local_[r].full_heads = 0;
    local_[r].spans.clear();
  }

  void collect_ranks(int32_t s) {
    ranks_.clear();
    for (int64_t k = v_.segment_offsets[s]; k < v_.segment_offsets[s + 1]; ++k) touch(s, v_.segment_rank[k]);
    for (int64_t k = v_.tile_offsets[s]; k < v_.tile_offsets[s + 1]; ++k) touch(s, v_.tile_rank[k]);
  }

  // Traffic.
  void add_traffic(int32_t s) {
    ++result_.num_split;
    std::sort(ranks_.begin(), ranks_.end());
    meetings_.insert(ranks_);
    for (int64_t k = v_.segment_offsets[s]; k < v_.segment_offsets[s + 1]; ++k) {
      local_[v_.segment_rank[k]].tokens += v_.segment_end[k] - v_.segment_start[k];
    }
    bool partial = false;
    for (int64_t k = v_.tile_offsets[s]; k < v_.tile_offsets[s + 1]; ++k) {
      auto& x = local_[v_.tile_rank[k]];
      x.spans.push_back({v_.tile_head_start[k], v_.tile_head_end[k]});
      if (is_full(s, k)) {
        x.full_heads += v_.tile_head_end[k] - v_.tile_head_start[k];
      } else {
        partial = true;
      }
    }
    add_full_rows();
    if (partial) add_partial_rows(s);
  }

  bool is_full(int32_t s, int64_t k) const {
    return v_.tile_query_start[k] == 0 && v_.tile_query_end[k] == p_.lengths[s];
  }

  // k and v of every tile, q and output of the tiles that have all rows: products of tokens and heads, summed by node.
  void add_full_rows() {
    NodeSum all;
    for (int32_t r : ranks_) node_[p_.node_index[r]] = NodeSum{};
    for (int32_t r : ranks_) {
      auto& x = local_[r];
      x.kv_heads = union_size(x.spans);
      for (NodeSum* sum : {&node_[p_.node_index[r]], &all}) {
        sum->tokens += x.tokens;
        sum->kv_heads += x.kv_heads;
        sum->full_heads += x.full_heads;
      }
    }
    for (int32_t r : ranks_) {
      const auto& x = local_[r];
      const auto& near = node_[p_.node_index[r]];
      add_rank_flows(r, x, near.tokens - x.tokens, near.kv_heads - x.kv_heads, near.full_heads - x.full_heads, 0);
      add_rank_flows(r, x, all.tokens - near.tokens, all.kv_heads - near.kv_heads, all.full_heads - near.full_heads, 1);
    }
    if (p_.latency_s > 0.0) add_full_peers();
  }

  void add_full_peers() {
    for (int32_t owner : ranks_) {
      if (local_[owner].tokens == 0) continue;
      for (int32_t worker : ranks_) {
        if (local_[worker].kv_heads > 0) before_peers_.add(owner, worker);
        if (local_[worker].full_heads > 0) after_peers_.add(owner, worker);
      }
    }
  }

  void add_rank_flows(int32_t r, const Local& x, int64_t other_tokens, int64_t other_kv, int64_t other_full, int far) {
    const double b = p_.bytes_per_head_token;
    const double rows_out = static_cast<double>(x.tokens) * static_cast<double>(other_full) * b;
    const double rows_in = static_cast<double>(other_tokens) * static_cast<double>(x.full_heads) * b;
    const double kv_out = 2.0 * static_cast<double>(x.tokens) * static_cast<double>(other_kv) * b;
    const double kv_in = 2.0 * static_cast<double>(other_tokens) * static_cast<double>(x.kv_heads) * b;
    auto& flow = flows_[r];
    flow[kBeforeOutNear + far] += kv_out + rows_out;
    flow[kBeforeInNear + far] += kv_in + rows_in;
    flow[kAfterInNear + far] += rows_out;
    flow[kAfterOutNear + far] += rows_in;
    result_.bytes += kv_in + 2.0 * rows_in;
  }

  // q and output of the tiles that have some rows: the overlap of each with each segment.
  void add_partial_rows(int32_t s) {
    const int64_t* ends = v_.segment_end + v_.segment_offsets[s];
    const int64_t* last = v_.segment_end + v_.segment_offsets[s + 1];
    for (int64_t k = v_.tile_offsets[s]; k < v_.tile_offsets[s + 1]; ++k) {
      if (is_full(s, k)) continue;
      const auto heads = static_cast<double>(v_.tile_head_end[k] - v_.tile_head_start[k]);
      for (const int64_t* at = std::upper_bound(ends, last, v_.tile_query_start[k]); at != last; ++at) {
        const int64_t g = at - v_.segment_end;
        const int64_t rows = std::min(*at, v_.tile_query_end[k]) - std::max(v_.segment_start[g], v_.tile_query_start[k]);
        if (rows <= 0) break;
        add_pair(v_.segment_rank[g], v_.tile_rank[k], heads * static_cast<double>(rows) * p_.bytes_per_head_token);
      }
    }
  }

  void add_pair(int32_t owner, int32_t worker, double bytes) {
    if (owner == worker) return;
    const int far = p_.node_index[owner] == p_.node_index[worker] ? 0 : 1;
    flows_[owner][kBeforeOutNear + far] += bytes;
    flows_[worker][kBeforeInNear + far] += bytes;
    flows_[worker][kAfterOutNear + far] += bytes;
    flows_[owner][kAfterInNear + far] += bytes;
    result_.bytes += 2.0 * bytes;
    if (p_.latency_s > 0.0) after_peers_.add(owner, worker);
  }

  // Communication and makespan.
  void end_lane() {
    for (int32_t r = 0; r < p_.num_ranks; ++r) {
      lane_.communication_s[r] = communication_s(r);
      result_.linear_s[r] += lane_.linear_s[r];
      result_.attention_s[r] += lane_.attention_s[r];
      result_.communication_s[r] += lane_.communication_s[r];
    }
    for (const auto& ranks : meetings_) {
      double linear = 0.0, attention = 0.0, communication = 0.0;
      for (int32_t r : ranks) {
        linear = std::max(linear, lane_.linear_s[r]);
        attention = std::max(attention, lane_.attention_s[r]);
        communication = std::max(communication, lane_.communication_s[r]);
      }
      result_.makespan_s = std::max(result_.makespan_s, linear + attention + communication);
    }
    result_.num_meetings += static_cast<int64_t>(meetings_.size());
  }

  double communication_s(int32_t r) {
    const auto& f = flows_[r];
    const double near = std::max(f[kBeforeOutNear], f[kBeforeInNear]) + std::max(f[kAfterOutNear], f[kAfterInNear]);
    const double far = std::max(f[kBeforeOutFar], f[kBeforeInFar]) + std::max(f[kAfterOutFar], f[kAfterInFar]);
    double seconds = p_.communication_scale * (near / p_.intra_bytes_per_s + far / p_.inter_bytes_per_s);
    if (p_.latency_s > 0.0) {
      const auto peers = static_cast<double>(before_peers_.count(r) + after_peers_.count(r));
      seconds += p_.communication_scale * p_.latency_s * peers;
    }
    return seconds;
  }

  void add_ranks() {
    const double interference = v_.num_lanes > 1 ? p_.interference : 0.0;
    auto& e = result_;
    for (int32_t r = 0; r < p_.num_ranks; ++r) {
      e.makespan_s = std::max(e.makespan_s, e.linear_s[r] + e.attention_s[r] + interference * e.communication_s[r]);
    }
  }

  // Of the lane that is being added up.
  struct Lane {
    std::vector<double> linear_s, attention_s, communication_s;  // (N,)
  };

  const Problem& p_;
  const PlanView& v_;
  Evaluation result_;  // of all lanes
  Lane lane_;
  std::vector<std::array<double, kFlows>> flows_;
  Peers before_peers_, after_peers_;  // only where there is a latency
  std::vector<Local> local_;
  std::vector<int32_t> mark_;
  std::vector<int32_t> ranks_;
  std::vector<NodeSum> node_;
  std::set<std::vector<int32_t>> meetings_;
};

}  // namespace

Evaluation evaluate(const Problem& problem, const PlanView& plan) { return Evaluator(problem, plan).run(); }

}  // namespace knapformer
