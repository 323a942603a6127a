// What a planner is given, and the columnar plan that it gives back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace knapformer {

constexpr int64_t kNoCap = int64_t{1} << 42;  // above any step's tokens; sums over a million ranks stay exact

// How much `moldable` tries before it settles. Limits are counts of work, so that the plan is the same on every rank.
enum class Effort : int32_t { kFast, kDefault, kThorough };

// One step of one balancing group. Times are seconds of one layer's forward pass on a rank of speed 1.
struct Problem {
  std::vector<int64_t> lengths;     // (S,) tokens
  std::vector<int32_t> homes;       // (S,) rank that loaded the sequence
  std::vector<double> attention_s;  // (S,) attention over all heads and rows
  double linear_s_per_token = 0.0;
  int32_t num_ranks = 0;
  int32_t num_heads = 0;
  std::vector<double> speeds;   // (N,)
  std::vector<int32_t> nodes;   // (N,)
  double intra_bytes_per_s = 0.0;
  double inter_bytes_per_s = 0.0;
  double communication_scale = 0.0;
  double bytes_per_head_token = 0.0;
  double latency_s = 0.0;     // of each exchange, once for each peer
  double interference = 0.0;  // part of a rank's speed that a running exchange takes, where two lanes take turns
  double link_margin = 1.0;   // links may be so many times slower than stated: moldable/slower_links.hpp
  Effort effort = Effort::kDefault;
  std::vector<int64_t> max_tokens;  // (N,) hard caps; kNoCap where there is none

  // Derived once by `prepare`.
  std::vector<double> work_s;  // (S,) linear phase and attention
  double total_work_s = 0.0;
  double total_speed = 0.0;
  std::vector<int32_t> heaviest_first;  // (S,) ids by falling work, ties by id
  std::vector<int32_t> node_index;      // (N,) nodes renumbered 0.. in order of first rank
  int32_t num_nodes = 0;

  void prepare();
  int32_t num_sequences() const { return static_cast<int32_t>(lengths.size()); }
  double linear_s(int32_t s) const { return linear_s_per_token * static_cast<double>(lengths[s]); }
  double lower_bound_s() const { return total_speed > 0 ? total_work_s / total_speed : 0.0; }
};

struct Segment {
  int32_t rank;
  int64_t start, end;
};

struct Tile {
  int32_t rank, head_start, head_end;
  int64_t query_start, query_end;
};

// Placement of one sequence while a planner is still at work.
struct Placement {
  std::vector<Segment> segments;
  std::vector<Tile> tiles;
};

Placement whole_on(const Problem& problem, int32_t sequence, int32_t rank);

// Borrowed columns of a plan: those of PlanColumns, or NumPy's.
struct PlanView {
  int32_t num_sequences;
  int32_t num_lanes;    // 1 or 2
  const int8_t* lane;  // of each sequence; null where there is one lane
  const int64_t* segment_offsets;
  const int32_t* segment_rank;
  const int64_t* segment_start;
  const int64_t* segment_end;
  const int64_t* tile_offsets;
  const int32_t* tile_rank;
  const int32_t* tile_head_start;
  const int32_t* tile_head_end;
  const int64_t* tile_query_start;
  const int64_t* tile_query_end;

  int32_t lane_of(int32_t s) const { return lane == nullptr ? 0 : lane[s]; }
};

// A plan, sequence after sequence: offsets and flat columns (segments by start; tiles by head, then query row).
struct PlanColumns {
  std::vector<int8_t> lane;  // (S,) 0 or 1; empty where there is one lane
  std::vector<int64_t> segment_offsets{0};
  std::vector<int32_t> segment_rank;
  std::vector<int64_t> segment_start, segment_end;
  std::vector<int64_t> tile_offsets{0};
  std::vector<int32_t> tile_rank, tile_head_start, tile_head_end;
  std::vector<int64_t> tile_query_start, tile_query_end;
  std::string reason;  // why it was chosen, where a planner has several to choose from

  void add_segment(int32_t rank, int64_t start, int64_t end);  // an empty one is dropped
  void add_tile(int32_t rank, int32_t head_start, int32_t head_end, int64_t query_start, int64_t query_end);
  void end_sequence();
  void add_whole(const Problem& problem, int32_t sequence, int32_t rank);
  // Equal segments and tiles over `count` consecutive ranks, cut at floor(k·L / count) and floor(k·H / count).
  void add_even(const Problem& problem, int32_t sequence, int32_t first_rank, int32_t count);
  void add_placement(Placement&& placement);
  PlanView view() const;
};

}  // namespace knapformer
