// Why the tight bound holds. Let a legal plan have makespan T.
//   Claim 1. Every rank r has linear_r + attention_r + communication_r ≤ T: in a meeting by its definition; elsewhere communication
//      is 0. Times speed_r and summed: work + min speed · Σ communication_r ≤ T · Σ speed.
//   Claim 2. Σ communication_r ≥ scale · Σ bytes received / link, since each exchange takes at least what comes in.
//   Claim 3. Bytes of a sequence of length L: let rank j hold a share x of its tokens and y of its heads × rows. It works on
//      κ ≥ y·H heads, so it receives 2κ·L(1−x) of k and v, and twice at least y·H·L − κ·x·L rows (q in, output out). The sum
//      is linear in κ between its kinks: at least y(1−x)·H·L·min(4, 2/x).
//   Claim 4. With a = attention, l = linear, p = l/(l+a) and u = T·max speed/(l+a): no rank does more than u of the sequence,
//      p·x + (1−p)·y ≤ u. Hence x ≤ u/p, y ≤ u/(1−p), and x·y ≤ (p·x + (1−p)·y)² / (4p(1−p)), so that
//      Σ x·y ≤ min(1, u/p, u/(1−p), u/(4p(1−p))), the share that can stay where it is.
//   Claim 5. So a sequence moves at least (1 − Σ x·y)·H·L·min(4, 2/min(1, u/p)) bytes-per-head-token, falling in T; none if u ≥ 1.
//   Claim 6. Of these, bytes between nodes: let a set of nodes hold the share x of the tokens and y of the heads × rows, the others
//      the rest. As in claim 3, with x ≥ 1/2: one side receives at least 2(y/x)(1−x), the other 4x(1−y) (times H·L), together
//      falling in y. Shares of work per node are at most v = T·largest node's speed/(l+a), so that some set of nodes does
//      between 1/3 and max(2/3, v) of it (one node, or small ones together); the side with x ≥ 1/2 then has
//      p·x + (1−p)·y ≤ Z = max(2/3, v). The least of this over x is found on a grid, each interval bounded from below; it falls
//      in T; none if v ≥ 1.
//   Claim 7. The bound is the least T that satisfies claim 1; the set of such T is an upward ray, and bisection finds its end from below.
// Rounding to heads is no part of it: tiles over query rows lift it. Caps are left out, and that a meeting waits for its slowest.
#include "bounds.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace knapformer {
namespace {

constexpr int kIntervals = 64;

struct Shares {
  double linear, attention;  // of the sequence's work; sum 1
  double most_of_rank, most_of_node;
  double unit_bytes;  // of one tensor's rows: H·L heads × tokens
};

Shares shares_of(const Problem& problem, int32_t s, double rank_speed, double node_speed, double makespan_s) {
  const double linear = problem.linear_s(s), attention = problem.attention_s[s], work = linear + attention;
  return {linear / work, attention / work, makespan_s * rank_speed / work, makespan_s * node_speed / work,
          problem.num_heads * static_cast<double>(problem.lengths[s]) * problem.bytes_per_head_token};
}

// Claims 3 to 5.
double least_bytes(const Shares& of) {
  const double u = of.most_of_rank, p = of.linear, q = of.attention;
  if (u >= 1.0) return 0.0;
  double stay = 1.0;
  if (p > 0) stay = std::min(stay, u / p);
  if (q > 0) stay = std::min(stay, u / q);
  if (p > 0 && q > 0) stay = std::min(stay, u / (4.0 * p * q));
  const double most_tokens = p > 0 ? std::min(1.0, u / p) : 1.0;
  return (1.0 - stay) * std::min(4.0, 2.0 / most_tokens) * of.unit_bytes;
}

// Claim 6.
double least_bytes_between_nodes(const Shares& of) {
  if (of.most_of_node >= 1.0) return 0.0;
  const double most = std::max(2.0 / 3.0, of.most_of_node);
  double least = std::numeric_limits<double>::infinity();
  for (int k = 0; k < kIntervals; ++k) {
    const double from = 0.5 + 0.5 * k / kIntervals, to = 0.5 + 0.5 * (k + 1) / kIntervals;
    if (of.linear * from > most) break;
    const double y = of.attention > 0 ? std::min(1.0, (most - of.linear * from) / of.attention) : 1.0;
    least = std::min(least, 4.0 * from * (1.0 - y) + 2.0 * y * (1.0 / to - 1.0));
  }
  return least * of.unit_bytes;
}

// Claim 2, of one sequence.
double least_communication_s(const Problem& problem, const Shares& shares) {
  const double all = least_bytes(shares), far = least_bytes_between_nodes(shares);
  const double inter = problem.inter_bytes_per_s, intra = problem.intra_bytes_per_s;
  const double seconds = inter <= intra ? far / inter + std::max(0.0, all - far) / intra : std::max(all, far) / inter;
  return problem.communication_scale * seconds;
}

double fastest_node(const Problem& problem) {
  std::vector<double> speed(static_cast<size_t>(problem.num_nodes), 0.0);
  for (int32_t r = 0; r < problem.num_ranks; ++r) speed[problem.node_index[r]] += problem.speeds[r];
  return *std::max_element(speed.begin(), speed.end());
}

}  // namespace

double tight_bound_s(const Problem& problem) {
  const double base = problem.lower_bound_s();
  if (base <= 0.0) return 0.0;
  const double max_speed = *std::max_element(problem.speeds.begin(), problem.speeds.end());
  const double min_speed = *std::min_element(problem.speeds.begin(), problem.speeds.end());
  const double node_speed = fastest_node(problem);
  std::vector<int32_t> heavy;
  for (int32_t s = 0; s < problem.num_sequences(); ++s) {
    if (problem.work_s[s] > base * max_speed) heavy.push_back(s);
  }
  const auto needed = [&](double makespan_s) {
    double seconds = 0.0;
    for (int32_t s : heavy) {
      seconds += least_communication_s(problem, shares_of(problem, s, max_speed, node_speed, makespan_s));
    }
    return (problem.total_work_s + min_speed * seconds) / problem.total_speed;
  };
  double low = base, high = needed(base);
  for (int k = 0; k < 50 && high > low; ++k) {
    const double middle = 0.5 * (low + high);
    (needed(middle) > middle ? low : high) = middle;
  }
  return low;
}

}  // namespace knapformer
