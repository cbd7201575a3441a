// Copies of many blocks of memory by several threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

struct Blocks {
  const int64_t* to;
  const int64_t* from;
  const int64_t* sizes;
  int64_t count;

  // Copies the bytes [begin, end) of all blocks, one behind the other.
  void copy(int64_t begin, int64_t end) const {
    int64_t at = 0;
    for (int64_t i = 0; i < count && at < end; at += sizes[i++]) {
      const int64_t first = std::max(begin - at, int64_t{0}), last = std::min(end - at, sizes[i]);
      if (first < last) {
        std::memcpy(reinterpret_cast<char*>(to[i]) + first, reinterpret_cast<const char*>(from[i]) + first, last - first);
      }
    }
  }
};

}  // namespace

// Blocks do not overlap. All are copied when it returns. With fewer threads than asked for, where the system grants no more.
extern "C" void copy_blocks(const int64_t* to, const int64_t* from, const int64_t* sizes, int64_t count, int64_t threads) {
  const Blocks blocks{to, from, sizes, count};
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += sizes[i];
  const int64_t share = (total + threads - 1) / threads;
  std::vector<std::thread> others;
  int64_t begin = 0;
  try {
    others.reserve(threads - 1);
    for (; static_cast<int64_t>(others.size()) < threads - 1; begin += share) {
      others.emplace_back([=] { blocks.copy(begin, std::min(begin + share, total)); });
    }
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  blocks.copy(std::min(begin, total), total);
  for (auto& other : others) other.join();
}
