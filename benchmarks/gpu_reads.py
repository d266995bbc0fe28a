# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, B023, E501
"""What reads of another GPU can reach by other means than Triton: ``python -m benchmarks.gpu_reads`` (needs CuPy, two GPUs).

Vector loads with L2 hints, and bulk copies through shared memory (cp.async.bulk) with few programs; checked for equality.
"""

from __future__ import annotations

import statistics

import cupy
import torch

SRC = r"""
extern "C" {
#define LOAD(NAME, OP) \
__global__ void NAME(const char* src, char* dst, unsigned long long n) { \
  unsigned long long base = (unsigned long long)blockIdx.x * 65536ull + threadIdx.x * 16; \
  for (int s = 0; s < 65536; s += blockDim.x * 16 * 4) { \
    uint4 v[4]; \
    _Pragma("unroll") for (int u = 0; u < 4; u++) asm volatile(OP " {%0,%1,%2,%3}, [%4];" : "=r"(v[u].x),"=r"(v[u].y),"=r"(v[u].z),"=r"(v[u].w) : "l"(src + base + s + (unsigned long long)u * blockDim.x * 16)); \
    _Pragma("unroll") for (int u = 0; u < 4; u++) *(uint4*)(dst + base + s + (unsigned long long)u * blockDim.x * 16) = v[u]; \
  } }
LOAD(plain, "ld.global.v4.u32")
LOAD(l2_128, "ld.global.L2::128B.v4.u32")
LOAD(l2_256, "ld.global.L2::256B.v4.u32")
LOAD(nc_256, "ld.global.nc.L1::no_allocate.L2::256B.v4.u32")
__device__ __forceinline__ unsigned sm(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void bulk(const char* src, char* dst, unsigned long long n, int chunk, int stages) {
  extern __shared__ __align__(128) char buffer[];
  __shared__ __align__(8) unsigned long long bar[16];
  if (threadIdx.x) return;
  for (int i = 0; i < stages; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(sm(&bar[i])));
  asm volatile("fence.mbarrier_init.release.cluster;"); asm volatile("fence.proxy.async.shared::cta;");
  long long chunks = n / chunk, mine = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  for (long long k = 0; k < mine + stages - 1; k++) {
    if (k < mine) {
      int s = k % stages;
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(sm(&bar[s])), "r"(chunk) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(sm(buffer + s * chunk)), "l"(src + (blockIdx.x + k * gridDim.x) * (unsigned long long)chunk), "r"(chunk), "r"(sm(&bar[s])) : "memory");
    }
    long long d = k - (stages - 1);
    if (d >= 0) {
      int s = d % stages; unsigned parity = (d / stages) & 1, done = 0;
      while (!done) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sm(&bar[s])), "r"(parity) : "memory");
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(dst + (blockIdx.x + d * gridDim.x) * (unsigned long long)chunk), "r"(sm(buffer + s * chunk)), "r"(chunk) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
}
"""


def main():
    n = 2 << 30
    mod = cupy.RawModule(code=SRC, options=("-arch=sm_90",), backend="nvrtc")
    here = torch.empty(n // 8, dtype=torch.int64, device="cuda:0")
    local = torch.empty(n // 8, dtype=torch.int64, device="cuda:0").random_()
    others = [torch.empty(n // 8, dtype=torch.int64, device="cuda:1").random_()] if torch.cuda.device_count() > 1 else [local]
    for other in others:
        name = "local" if other is local else "peer"
        if other is not local:
            cupy.cuda.Device(0).use()
            cupy.cuda.runtime.deviceEnablePeerAccess(1)
        here.copy_(other)
        torch.cuda.synchronize()

        def timed(work):
            times = []
            for _ in range(7):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                work()
                b.record()
                b.synchronize()
                times.append(a.elapsed_time(b))
            return n / statistics.median(times[2:]) / 1e6

        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(0).cuda_stream, 0)
        print(name, "torch copy", round(timed(lambda: here.copy_(other))))
        with cupy.cuda.Device(0), stream:
            for kernel in ("plain", "l2_128", "l2_256", "nc_256"):
                for threads in (256, 1024):
                    f = mod.get_function(kernel)
                    here.zero_()
                    speed = timed(
                        lambda: f(
                            (n >> 16,), (threads,), (cupy.uint64(other.data_ptr()), cupy.uint64(here.data_ptr()), cupy.uint64(n))
                        )
                    )
                    ok = torch.equal(here, other.to("cuda:0"))
                    print(name, kernel, threads, round(speed), ok, flush=True)
            f = mod.get_function("bulk")
            f.max_dynamic_shared_size_bytes = 200 << 10
            for grid, chunk, stages in (
                (132, 16384, 4),
                (132, 32768, 4),
                (132, 8192, 8),
                (264, 16384, 4),
                (66, 32768, 6),
                (32, 32768, 6),
                (16, 32768, 6),
                (528, 8192, 4),
            ):
                here.zero_()
                speed = timed(
                    lambda: f(
                        (grid,),
                        (32,),
                        (
                            cupy.uint64(other.data_ptr()),
                            cupy.uint64(here.data_ptr()),
                            cupy.uint64(n),
                            cupy.int32(chunk),
                            cupy.int32(stages),
                        ),
                        shared_mem=chunk * stages,
                    )
                )
                ok = torch.equal(here, other.to("cuda:0"))
                print(name, "bulk", grid, chunk, stages, round(speed), ok, flush=True)


if __name__ == "__main__":
    main()
