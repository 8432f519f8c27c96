# SPDX-License-Identifier: Apache-2.0
"""What loading and saving whole files has in common, whatever is in them: `ugds.safetensors` and `ugds.torch` are made
of it.

`files` opens a file to read, and replaces one; `layout` decides which bytes of a file land where in memory; `memory` is
the tensors of PyTorch and NumPy; `transfer` moves the bytes, with many requests in flight; `progress` draws a bar.
"""
