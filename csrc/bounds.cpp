// The tight bound. Let a legal plan have makespan T.
//   1. Every rank r has linear_r + attention_r + communication_r ≤ T: in a meeting by its definition; elsewhere communication
//      is 0. Times speed_r and summed: work + min speed · Σ communication_r ≤ T · Σ speed.
//   2. Σ communication_r ≥ scale / fastest link · bytes received, since each exchange takes at least what comes in.
//   3. Bytes of a sequence of length L: let rank j hold a share x of its tokens and y of its heads × rows. It works on
//      κ ≥ y·H heads, so it receives 2κ·L(1−x) of k and v, and twice at least y·H·L − κ·x·L rows (q in, output out). The sum
//      is linear in κ between its kinks: at least y(1−x)·H·L·min(4, 2/x).
//   4. With a = attention, l = linear, p = l/(l+a) and u = T·max speed/(l+a): no rank does more than u of the sequence,
//      p·x + (1−p)·y ≤ u. Hence x ≤ u/p, y ≤ u/(1−p), and x·y ≤ (p·x + (1−p)·y)² / (4p(1−p)), so that
//      Σ x·y ≤ min(1, u/p, u/(1−p), u/(4p(1−p))), the share that can stay where it is.
//   5. So a sequence moves at least (1 − Σ x·y)·H·L·min(4, 2/min(1, u/p)) bytes-per-head-token, falling in T; none if u ≥ 1.
//   6. The bound is the least T that satisfies 1; the set of such T is an upward ray, and bisection finds its end from below.
// Rounding to heads is no part of it: tiles over query rows lift it. Caps and the links between nodes are left out.
#include "bounds.hpp"

#include <algorithm>

namespace knapformer {
namespace {

double least_bytes(const Problem& problem, int32_t s, double max_speed, double makespan_s) {
  const double linear = problem.linear_s(s), attention = problem.attention_s[s], work = linear + attention;
  const double u = makespan_s * max_speed / work;
  if (u >= 1.0) return 0.0;
  const double p = linear / work, q = attention / work;
  double stay = 1.0;
  if (p > 0) stay = std::min(stay, u / p);
  if (q > 0) stay = std::min(stay, u / q);
  if (p > 0 && q > 0) stay = std::min(stay, u / (4.0 * p * q));
  const double most_tokens = p > 0 ? std::min(1.0, u / p) : 1.0;
  const double factor = std::min(4.0, 2.0 / most_tokens);
  return (1.0 - stay) * factor * problem.num_heads * static_cast<double>(problem.lengths[s]) * problem.bytes_per_head_token;
}

}  // namespace

double tight_bound_s(const Problem& problem) {
  const double base = problem.lower_bound_s();
  if (base <= 0.0) return 0.0;
  const double max_speed = *std::max_element(problem.speeds.begin(), problem.speeds.end());
  const double min_speed = *std::min_element(problem.speeds.begin(), problem.speeds.end());
  const double link = std::max(problem.intra_bytes_per_s, problem.inter_bytes_per_s);
  const double per_byte = min_speed * problem.communication_scale / link;
  std::vector<int32_t> heavy;
  for (int32_t s = 0; s < problem.num_sequences(); ++s) {
    if (problem.work_s[s] > base * max_speed) heavy.push_back(s);
  }
  const auto needed = [&](double makespan_s) {
    double bytes = 0.0;
    for (int32_t s : heavy) bytes += least_bytes(problem, s, max_speed, makespan_s);
    return (problem.total_work_s + per_byte * bytes) / problem.total_speed;
  };
  double low = base, high = needed(base);
  for (int k = 0; k < 50 && high > low; ++k) {
    const double middle = 0.5 * (low + high);
    (needed(middle) > middle ? low : high) = middle;
  }
  return low;
}

}  // namespace knapformer
