// SPDX-License-Identifier: Apache-2.0
//
// Where faults are kept for `ugds doctor --last-fault`: a small file in the user's folder of states, and beside it the
// last commands of the device that wedged last. The folder is UGDS_STATE_DIR, or `ugds` in XDG_STATE_HOME, or
// .local/state/ugds at home; where there is none that is ours alone to write, or the disk is full, nothing is kept and
// nobody is told. An empty UGDS_STATE_DIR keeps nothing. A program that has more rights than who started it keeps
// nothing either.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ugds {

/// The two newest files of faults together hold at most twice this, in bytes.
inline constexpr std::size_t kFaultFileSize = 128 * 1024;
inline constexpr const char* kFaultFile = "faults.jsonl";
inline constexpr const char* kOlderFaultFile = "faults.1.jsonl";
inline constexpr const char* kWedgeTrace = "wedge.trace.json";

/// The folder, or "" where nothing is kept.
const std::string& state_folder();
inline bool keeps_faults() { return !state_folder().empty(); }
/// Appends one line, with its newline. Called by the log's thread alone.
void append_fault(std::string_view line) noexcept;
/// Keeps a trace instead of the one before.
void keep_wedge_trace(std::string_view trace) noexcept;

}  // namespace ugds
