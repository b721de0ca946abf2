"""What kernel and CPU offer: mapped memory, io_uring, intrinsics, buffers."""
