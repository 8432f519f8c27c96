// SPDX-License-Identifier: Apache-2.0
//
// Captures of streams into graphs, as far as a library must notice them: what is enqueued on a capturing stream does
// not run, and calls that cannot be captured are refused and spoil the capture. Graphs cannot be replayed.
#pragma once

#include <memory>
#include <thread>

#include "stream.hpp"

namespace fake_cuda {

struct Capture {
  Stream* origin = nullptr;
  int mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  bool is_spoiled = false;
  std::size_t nodes = 0;
};

struct Graph {
  std::size_t nodes = 0;
};

CUresult begin_capture(Stream& stream, int mode);
/// Gives the graph, or nullptr where the capture was spoiled.
CUresult end_capture(Stream& stream, std::shared_ptr<Graph>& graph);
CUresult capture_status(Stream& stream, int& status);
/// Whether the stream is being captured, or cannot be used because another is; then `code` is what the call returns.
bool record(Stream& stream, std::size_t nodes, CUresult& code);
std::shared_ptr<Capture> capture_of(const Stream& stream);
/// The stream waits for an event of that capture, and is part of it from then on.
CUresult join_capture(Stream& stream, const std::shared_ptr<Capture>& capture);
/// The stream goes away: it spoils the capture that it takes part in.
void forget_capture(Stream& stream);
/// What waiting for, or asking about, this stream is while it is being captured: refused.
CUresult refuse_captured(Stream& stream);
/// For calls that may not be made while somebody captures, unless the mode allows it.
CUresult unsafe_call();
int exchange_mode(int mode);

}  // namespace fake_cuda
