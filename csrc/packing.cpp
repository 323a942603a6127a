#include "packing.hpp"

#include <algorithm>
#include <iterator>
#include <queue>
#include <utility>

namespace knapformer {
namespace {

constexpr double kGain = 1e-9;  // smallest relative gain worth a change

bool heavier(const Item& a, const Item& b) { return a.work_s != b.work_s ? a.work_s > b.work_s : a.id < b.id; }

double level_after(const Bin& from, const Bin& to, double moved) {
  return std::max((from.load_s - moved) / from.size, (to.load_s + moved) / to.size);
}

bool fits(const Bin& from, const Bin& to, int64_t give_tokens, int64_t take_tokens) {
  return to.room + take_tokens >= give_tokens && from.room + give_tokens >= take_tokens;
}

// The best partner for item `give` in `to`: the items on both sides of the ideal difference, and no item at all.
void try_item(const Bin& from, const Bin& to, size_t to_index, size_t give, Change& best) {
  const Item& x = from.items[give];
  const double ideal = (from.load_s * to.size - to.load_s * from.size) / (from.size + to.size);
  const auto consider = [&](double moved, int64_t take, int64_t take_tokens) {
    const double level = level_after(from, to, moved);
    if (level < best.level && fits(from, to, x.tokens, take_tokens)) best = {level, to_index, give, take};
  };
  consider(x.work_s, -1, 0);
  const double partner = x.work_s - ideal;
  const auto at = std::lower_bound(to.items.begin(), to.items.end(), partner,
                                   [](const Item& item, double work) { return item.work_s > work; });
  const auto middle = static_cast<int64_t>(at - to.items.begin());
  for (int64_t k = std::max<int64_t>(0, middle - 1); k < std::min<int64_t>(middle + 2, static_cast<int64_t>(to.items.size())); ++k) {
    if (to.items[k].work_s < x.work_s) consider(x.work_s - to.items[k].work_s, k, to.items[k].tokens);
  }
}

}  // namespace

void Bin::add(const Item& item) {
  items.insert(std::upper_bound(items.begin(), items.end(), item, heavier), item);
  load_s += item.work_s;
  room -= item.tokens;
}

void Bin::remove(size_t position) {
  load_s -= items[position].work_s;
  room += items[position].tokens;
  items.erase(items.begin() + static_cast<std::ptrdiff_t>(position));
}

std::vector<Item> pack(std::vector<Bin>& bins, const std::vector<Item>& heaviest_first) {
  using Entry = std::pair<double, size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  for (size_t b = 0; b < bins.size(); ++b) queue.push({bins[b].level(), b});
  std::vector<Item> left;
  std::vector<Entry> full;
  for (const Item& item : heaviest_first) {
    full.clear();
    while (!queue.empty() && bins[queue.top().second].room < item.tokens) {
      full.push_back(queue.top());
      queue.pop();
    }
    if (queue.empty()) {
      left.push_back(item);
    } else {
      const size_t b = queue.top().second;
      queue.pop();
      bins[b].add(item);
      queue.push({bins[b].level(), b});
    }
    for (const Entry& entry : full) queue.push(entry);
  }
  return left;
}

Change best_change(const std::vector<Bin>& bins, size_t from, size_t to, double level) {
  Change best{level};
  const auto& items = bins[from].items;
  for (size_t give = 0; give < items.size(); ++give) {
    if (give > 0 && items[give].work_s == items[give - 1].work_s && items[give].tokens == items[give - 1].tokens) continue;
    try_item(bins[from], bins[to], to, give, best);
  }
  return best;
}

void apply(std::vector<Bin>& bins, size_t from, const Change& change) {
  const Item give = bins[from].items[change.give];
  bins[from].remove(change.give);
  if (change.take >= 0) {
    const Item take = bins[change.to].items[static_cast<size_t>(change.take)];
    bins[change.to].remove(static_cast<size_t>(change.take));
    bins[from].add(take);
  }
  bins[change.to].add(give);
}

Levels::Levels(const std::vector<Bin>& bins) : level_(bins.size()) {
  for (size_t k = 0; k < bins.size(); ++k) {
    level_[k] = bins[k].level();
    order_.insert({level_[k], k});
  }
}

void Levels::update(const std::vector<Bin>& bins, size_t bin) {
  order_.erase({level_[bin], bin});
  level_[bin] = bins[bin].level();
  order_.insert({level_[bin], bin});
}

std::vector<size_t> Levels::lowest(size_t breadth) const {
  std::vector<size_t> found;
  for (auto at = order_.begin(); at != std::prev(order_.end()) && found.size() < breadth; ++at) found.push_back(at->second);
  return found;
}

void refine(std::vector<Bin>& bins, int steps, size_t breadth, double goal) {
  Levels levels(bins);
  for (int step = 0; step < steps; ++step) {
    const size_t from = levels.highest();
    if (bins[from].level() <= goal) return;
    const double before = bins[from].level() * (1.0 - kGain);
    Change best{before};
    for (size_t to : levels.lowest(breadth)) {
      const Change change = best_change(bins, from, to, best.level);
      if (change.level < best.level) best = change;
    }
    if (!(best.level < before)) return;
    apply(bins, from, best);
    levels.update(bins, from);
    levels.update(bins, best.to);
  }
}

}  // namespace knapformer
