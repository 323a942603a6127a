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
//   Claim 7. The meeting of a sequence that is split (work > T·max speed, so that no rank holds all of it) has phases λ, α, χ with
//      λ + α + χ ≤ T, each the largest over its ranks. With S the sum of all speeds, λ ≥ l/S and α ≥ a/S. So, whatever χ is known
//      to be at least, a rank computes at most η = (T − χ − l/S)·max speed / a of the heads × rows, and holds at most the share
//      (T − χ − a/S)·max speed / l of the tokens; a node likewise with its own speed.
//   Claim 8. A tile takes part of the queries, but all keys and values of its heads, and these are whole. With h_j ≤ h = η·H heads'
//      worth of rows, rank j needs k and v of κ_j ≥ ⌈h_j⌉ heads. N ranks cover H only if Σ min(κ_j, h) ≥ H, hence
//      Σ κ_j ≥ K = H where ⌊h⌋·N ≥ H, else ⌊h⌋·N + (H − ⌊h⌋·N) / (h − ⌊h⌋); no plan if h·N < H. Where h < 1 that is H/h: every
//      rank that computes anything receives the keys and values of one head at least.
//   Claim 9. Let places be ranks, or nodes, X_n the tokens of place n. What rank j of place n receives from others before attention
//      and sends back is 2κ_j(1 − X_n) + 2·max(0, h_j − κ_j·X_n) times L at least. Where all X_n ≤ 1/2 this grows with κ_j, so take
//      κ_j = ⌈h_j⌉. The sum over ranks is at least 2K + 2H − 4·Σ K_n X_n, with K_n the sum of κ in place n, at most ranks × ⌈h⌉, and
//      Σ K_n X_n ≤ min(max K_n, K·max X_n). Where one place has X > 1/2, leave out what it receives; the others have 1 − X < 1/2 among
//      them and compute at least H' = H − ranks·h: at least 2K' + 2H' − 2·min(max K_n, K'), K' covering H' as in claim 8.
//   Claim 10. χ is at least the mean over the M ranks with tiles, M ≥ H/h, of claim 9's seconds, where K ≥ M. This raises χ in claim
//      7; a few rounds do. No plan has l/S + a/S + χ > T.
//   Claim 11. Keys come from every rank with tokens, of which there are at least the inverse of the largest share. A rank with tiles
//      has one peer less at least, and pays the latency for each before attention. Peers of several sequences may be the same ranks, so
//      that the sum over all ranks counts the sequence with the most only.
//   Claim 12. The bound is the least T that satisfies claims 1 and 10. All that they ask for falls in T, so that the set of such T is an
//      upward ray, and bisection finds its end from below.
// Caps are left out. Of other sequences' loads only their sum over all ranks is counted.
#include "bounds.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace knapformer {
namespace {

constexpr int kIntervals = 64;
constexpr int kRounds = 3;             // of claim 10
constexpr int kCounts = 8;             // intervals of M in claim 10
constexpr double kSlack = 1.0 - 1e-9;  // rounding must never make the bound too high
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Group {
  double ranks, speed, max_speed, min_speed;
  double node_ranks, node_speed;  // of the largest node, and of the fastest one
};

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
double seconds_of(const Problem& problem, double all, double far) {
  const double inter = problem.inter_bytes_per_s, intra = problem.intra_bytes_per_s;
  const double seconds = inter <= intra ? far / inter + std::max(0.0, all - far) / intra : std::max(all, far) / inter;
  return problem.communication_scale * seconds;
}

// Claim 8: the least sum of heads whose keys and values `ranks` ranks need that compute `heads`, each at most `most` of them.
double least_key_heads(double heads, double most, double ranks) {
  heads *= kSlack;
  if (heads <= 0.0) return 0.0;
  if (most * ranks < heads) return kNever;
  const double full = std::floor(most), rest = heads - full * ranks;
  return rest <= 0.0 ? heads : full * ranks + rest / (most - full);
}

// What one meeting allows its ranks, and what follows for its communication (claims 7 to 11).
class Meeting {
 public:
  Meeting(const Problem& problem, const Group& group, int32_t s, double makespan_s)
      : p_(problem),
        group_(group),
        heads_(problem.num_heads),
        linear_s_(problem.linear_s(s)),
        attention_s_(problem.attention_s[s]),
        unit_bytes_(static_cast<double>(problem.lengths[s]) * problem.bytes_per_head_token),
        makespan_s_(makespan_s) {
    const Shares shares = shares_of(problem, s, group.max_speed, group.node_speed, makespan_s);
    even_all_ = least_bytes(shares);
    even_far_ = least_bytes_between_nodes(shares);
    for (int k = 0; k < kRounds && possible_; ++k) raise();
  }

  bool possible() const { return possible_; }
  double sum_s() const { return total_s(key_heads_); }
  double latency_sum_s() const { return least_ranks() * latency_s_; }

 private:
  void raise() {
    const double left_s = (makespan_s_ - slowest_s_) / kSlack;
    const double attention_s = left_s - linear_s_ / group_.speed, linear_s = left_s - attention_s_ / group_.speed;
    if (attention_s <= 0.0 || linear_s <= 0.0) {
      possible_ = false;
      return;
    }
    const auto share = [](double most_s, double all_s) { return all_s > most_s ? most_s / all_s : 1.0; };
    most_heads_ = heads_ * share(attention_s * group_.max_speed, attention_s_);
    rank_tokens_ = share(linear_s * group_.max_speed, linear_s_);
    node_tokens_ = share(linear_s * group_.node_speed, linear_s_);
    key_heads_ = least_key_heads(heads_, most_heads_, group_.ranks);
    latency_s_ = p_.communication_scale * p_.latency_s * std::max(0.0, std::ceil(kSlack / rank_tokens_) - 1.0);
    slowest_s_ = std::max(slowest_s_, mean_s());
    possible_ = (linear_s_ + attention_s_) / group_.speed + slowest_s_ <= makespan_s_ / kSlack;
  }

  double least_ranks() const { return heads_ / most_heads_; }

  // Claim 9, in heads × tokens of the sequence.
  double least_crossing(double key_heads, double place_ranks, double most_tokens) const {
    const double place_heads = place_ranks * std::ceil(most_heads_ / kSlack);
    const double stays = std::min(place_heads, key_heads * std::min(0.5, most_tokens));
    const double spread = 2.0 * key_heads + 2.0 * heads_ - 4.0 * stays;
    if (most_tokens <= 0.5) return std::max(0.0, spread);
    const double others = std::max(0.0, heads_ - place_ranks * most_heads_);
    const double their_keys = least_key_heads(others, most_heads_, std::max(0.0, group_.ranks - place_ranks));
    if (their_keys == kNever) return std::max(0.0, spread);
    return std::max(0.0, std::min(spread, 2.0 * others + 2.0 * std::max(0.0, their_keys - place_heads)));
  }

  double total_s(double key_heads) const {
    const double all = std::max(even_all_, unit_bytes_ * least_crossing(key_heads, 1.0, rank_tokens_));
    const double far = std::max(even_far_, unit_bytes_ * least_crossing(key_heads, group_.node_ranks, node_tokens_));
    return seconds_of(p_, all, far);
  }

  // Claim 10. Between two counts of ranks the sum is at least that of the smaller one, over at most the larger one.
  double mean_s() const {
    if (key_heads_ >= group_.ranks) return total_s(key_heads_) / group_.ranks + latency_s_;
    double least = total_s(key_heads_) / key_heads_;
    const double ratio = std::pow(group_.ranks / key_heads_, 1.0 / kCounts);
    double from = key_heads_;
    for (int k = 0; k < kCounts; ++k, from *= ratio) least = std::min(least, total_s(from) / (from * ratio));
    return kSlack * least + latency_s_;
  }

  const Problem& p_;
  const Group& group_;
  double heads_, linear_s_, attention_s_, unit_bytes_, makespan_s_;
  double even_all_ = 0.0, even_far_ = 0.0;  // claims 3 to 6
  double most_heads_ = 0.0, rank_tokens_ = 1.0, node_tokens_ = 1.0, key_heads_ = 0.0, latency_s_ = 0.0;
  double slowest_s_ = 0.0;  // χ
  bool possible_ = true;
};

Group group_of(const Problem& problem) {
  std::vector<double> speed(static_cast<size_t>(problem.num_nodes), 0.0), ranks(speed);
  for (int32_t r = 0; r < problem.num_ranks; ++r) {
    speed[problem.node_index[r]] += problem.speeds[r];
    ranks[problem.node_index[r]] += 1.0;
  }
  const auto [slowest, fastest] = std::minmax_element(problem.speeds.begin(), problem.speeds.end());
  return {static_cast<double>(problem.num_ranks),
          problem.total_speed,
          *fastest,
          *slowest,
          *std::max_element(ranks.begin(), ranks.end()),
          *std::max_element(speed.begin(), speed.end())};
}

// The makespan that claims 1 and 10 ask for where no rank may take longer than `makespan_s`; infinite where no plan can keep it.
double needed_s(const Problem& problem, const Group& group, const std::vector<int32_t>& heavy, double makespan_s) {
  double seconds = 0.0, latency_s = 0.0;
  for (int32_t s : heavy) {
    if (problem.work_s[s] <= makespan_s * group.max_speed) continue;
    const Meeting meeting(problem, group, s, makespan_s);
    if (!meeting.possible()) return kNever;
    seconds += meeting.sum_s();
    latency_s = std::max(latency_s, meeting.latency_sum_s());
  }
  return (problem.total_work_s + group.min_speed * (seconds + latency_s)) / group.speed;
}

}  // namespace

double tight_bound_s(const Problem& problem) {
  const double base = problem.lower_bound_s();
  if (base <= 0.0) return 0.0;
  const Group group = group_of(problem);
  std::vector<int32_t> heavy;
  for (int32_t s = 0; s < problem.num_sequences(); ++s) {
    if (problem.work_s[s] > base * group.max_speed) heavy.push_back(s);
  }
  const auto too_short = [&](double makespan_s) { return needed_s(problem, group, heavy, makespan_s) > makespan_s; };
  double low = base, high = base;
  while (too_short(high)) high *= 2.0;
  for (int k = 0; k < 50 && high > low; ++k) {
    const double middle = 0.5 * (low + high);
    (too_short(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace knapformer
