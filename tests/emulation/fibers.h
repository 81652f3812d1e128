// The threads of one CTA as fibers of one host thread, and the barriers between them.
//
// Between barriers a thread runs without interruption, and the warps run one after the other as far
// as the next barrier of the block, in an order drawn per CTA: what lacks a barrier reads something
// that is not there yet, or no longer. A barrier that not all threads reach aborts.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <type_traits>
#include <vector>

namespace emulation {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

enum class State { runs, at_warp_barrier, at_block_barrier, at_condition, done };

struct Fiber {
  static constexpr size_t kStackBytes = 128 << 10;

  ucontext_t start;  // only to enter: switching contexts by it takes two system calls
  jmp_buf position;
  bool has_started;
  State state;
  int phase;                        // alternates between the exchange buffers of its warp
  std::function<bool()> condition;  // what it waits for at_condition
  std::vector<char> stack;
};

// The values that the lanes of a warp exchange. While a lane reads one buffer, another lane may be
// one exchange further and write the other buffer.
struct Warp {
  static constexpr size_t kSlotBytes = 32;
  alignas(16) char slots[2][32 * kSlotBytes];
};

class Block {
 public:
  // Runs `body` once per thread; `enter(i)` before thread i runs on.
  void run(int num_threads, uint32_t seed, std::function<void()> body,
           const std::function<void(int)>& enter) {
    body_ = std::move(body);
    enter_ = &enter;
    fibers_.resize(num_threads);
    warps_.resize((num_threads + 31) / 32);
    for (Fiber& fiber : fibers_) {
      fiber.stack.resize(Fiber::kStackBytes);
      fiber.has_started = false;
      fiber.state = State::runs;
      fiber.phase = 0;
    }
    std::vector<int> order(warps_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    while (true) {
      for (const int warp : order) run_warp(warp);
      if (all_are(State::done)) return;
      if (any_runs()) continue;  // a thread polls what another process writes
      if (wake_by_condition()) continue;
      if (!all_are(State::at_block_barrier)) fail("not all threads reach a barrier of the block");
      for (Fiber& fiber : fibers_) fiber.state = State::runs;
    }
  }

  // The other threads run before this one does again.
  void yield() { leave(fibers_[current_]); }

  // The running thread waits until all threads of its warp or block wait.
  void wait(State at) {
    Fiber& fiber = fibers_[current_];
    fiber.state = at;
    leave(fiber);
  }

  // The running thread waits until others have made `condition` true.
  void wait_for(std::function<bool()> condition) {
    if (condition()) return;
    fibers_[current_].condition = std::move(condition);
    wait(State::at_condition);
  }

  // Every lane gives a value and gets those of all lanes, valid until its next but one exchange.
  template <typename T>
  const T* exchange(const T& value) {
    static_assert(sizeof(T) <= Warp::kSlotBytes && std::is_trivially_copyable_v<T>);
    Fiber& fiber = fibers_[current_];
    fiber.phase ^= 1;
    T* const slots = reinterpret_cast<T*>(warps_[current_ / 32].slots[fiber.phase]);
    slots[current_ % 32] = value;
    wait(State::at_warp_barrier);
    return slots;
  }

  int thread() const { return current_; }

 private:
  bool all_are(State state) const {
    return std::all_of(fibers_.begin(), fibers_.end(),
                       [&](const Fiber& fiber) { return fiber.state == state; });
  }

  bool any_runs() const {
    return std::any_of(fibers_.begin(), fibers_.end(),
                       [](const Fiber& fiber) { return fiber.state == State::runs; });
  }

  // Whether threads go on because what they waited for has come true.
  bool wake_by_condition() {
    bool any = false;
    for (Fiber& fiber : fibers_) {
      if (fiber.state != State::at_condition || !fiber.condition()) continue;
      fiber.state = State::runs;
      any = true;
    }
    return any;
  }

  // Until all lanes wait for the block or a condition, or are done, or one has yielded.
  void run_warp(int warp) {
    const int begin = warp * 32, end = std::min<int>(begin + 32, fibers_.size());
    while (true) {
      int num_waiting = 0;
      bool must_leave = false;
      for (int i = begin; i < end; ++i) {
        if (fibers_[i].state == State::runs) enter(i);
        const State state = fibers_[i].state;
        num_waiting += state == State::at_warp_barrier;
        must_leave |= state == State::runs || state == State::at_condition;
      }
      if (num_waiting == 0 || must_leave) return;
      if (num_waiting != end - begin) fail("not all lanes reach a collective of the warp");
      for (int i = begin; i < end; ++i) fibers_[i].state = State::runs;
    }
  }

  void enter(int index) {
    current_ = index;
    (*enter_)(index);
    Fiber& fiber = fibers_[index];
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.has_started) _longjmp(fiber.position, 1);
    fiber.has_started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    running_ = this;
    makecontext(&fiber.start, &Block::main, 0);
    setcontext(&fiber.start);
  }

  void leave(Fiber& fiber) {
    if (_setjmp(fiber.position) == 0) _longjmp(scheduler_, 1);
  }

  static void main() {
    Block& block = *running_;
    block.body_();
    Fiber& fiber = block.fibers_[block.current_];
    fiber.state = State::done;
    block.leave(fiber);
  }

  static inline Block* running_ = nullptr;
  std::function<void()> body_;
  const std::function<void(int)>* enter_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  jmp_buf scheduler_;
  int current_ = 0;
};

inline Block block;

}  // namespace emulation
