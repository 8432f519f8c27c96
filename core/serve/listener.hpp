// SPDX-License-Identifier: Apache-2.0
//
// The socket that clients find the server by.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/descriptor.hpp"

namespace ugds::serve {

class Listener {
 public:
  /// Listens at `path`; where that is a folder or ends in "/", at `cntrl` in it. A socket that a dead server left is
  /// replaced. Throws Failure: EADDRINUSE for a live server's, EEXIST for what is no socket, ENAMETOOLONG, ENOENT for a
  /// folder that is not there, and whatever else the system says.
  Listener(const std::string& path, mode_t mode);
  /// Removes the socket, if it is still this one.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  const std::string& path() const { return path_; }
  int socket() const { return socket_.get(); }

 private:
  std::string path_;
  Descriptor socket_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace ugds::serve
