#include <algorithm>
#include <cmath>

#include "moldable/group_solver.hpp"

namespace knapformer {
namespace {

// The level at which the ranks that are neither full nor above it take `total`.
double open_level(double total, const std::vector<double>& load, const std::vector<double>& speed,
                  const std::vector<char>& full) {
  double level = std::numeric_limits<double>::infinity();
  for (size_t round = 0; round <= load.size(); ++round) {
    double sum = total, width = 0.0;
    for (size_t i = 0; i < load.size(); ++i) {
      if (full[i] || load[i] >= level * speed[i]) continue;
      sum += load[i];
      width += speed[i];
    }
    const double next = width > 0 ? sum / width : 0.0;
    if (next >= level) break;
    level = next;
  }
  return level;
}

}  // namespace

void water_fill(double total, const std::vector<double>& load, const std::vector<double>& speed,
                const std::vector<double>& most, std::vector<double>& out) {
  const size_t n = load.size();
  std::vector<char> full(n, 0);
  out.assign(n, 0.0);
  for (size_t round = 0; round <= n; ++round) {
    double rest = total;
    for (size_t i = 0; i < n; ++i) rest -= full[i] ? most[i] : 0.0;
    const double level = open_level(std::max(rest, 0.0), load, speed, full);
    bool overflow = false;
    for (size_t i = 0; i < n; ++i) {
      out[i] = full[i] ? most[i] : std::max(0.0, level * speed[i] - load[i]);
      if (!full[i] && out[i] > most[i]) {
        full[i] = 1;
        overflow = true;
      }
    }
    if (!overflow) return;
  }
}

std::vector<int64_t> round_to_sum(const std::vector<double>& real, const std::vector<double>& most, int64_t total) {
  const size_t n = real.size();
  std::vector<int64_t> whole(n);
  int64_t left = total;
  for (size_t i = 0; i < n; ++i) {
    whole[i] = static_cast<int64_t>(std::floor(std::min(real[i], most[i])));
    left -= whole[i];
  }
  for (size_t i = 0; left < 0 && i < n; ++i) {  // rounding of the level may overshoot by a few
    const int64_t back = std::min(whole[i], -left);
    whole[i] -= back;
    left += back;
  }
  for (size_t i = 0; left > 0 && i < n; ++i) {
    if (real[i] <= 0.0 || static_cast<double>(whole[i] + 1) > most[i]) continue;
    ++whole[i];
    --left;
  }
  for (size_t i = 0; left > 0 && i < n; ++i) {
    const auto more = std::min(left, static_cast<int64_t>(std::floor(most[i])) - whole[i]);
    whole[i] += more;
    left -= more;
  }
  return whole;
}

}  // namespace knapformer
