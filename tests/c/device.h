/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a device by its URI, as a check. */
#ifndef UGDS_TESTS_DEVICE_H
#define UGDS_TESTS_DEVICE_H

#include "check.h"
#include "ugds.h"

static inline uGDSHandle_t open_device(const char* uri) {
  uGDSHandle_t fh = NULL;
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle = {.handle = (void*)uri}};
  CHECK(uGDSHandleRegister(&fh, &descr).err == UGDS_SUCCESS);
  return fh;
}

#endif
