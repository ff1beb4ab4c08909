  ;; Memory: results below 1024, texts below 65536, then the heap.
  (memory (export "memory") 2)
  (global $heap (mut i32) (i32.const 65536))

  ;; Allocates and never frees, because an instance exists for one call.
  (func $allocate (export "cabi_realloc") (param i32 i32 i32) (param $n_bytes i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and (i32.add (global.get $heap) (i32.const 7)) (i32.const -8)))
    (global.set $heap (i32.add (local.get $at) (local.get $n_bytes)))
    (if (i32.gt_u (global.get $heap) (i32.mul (memory.size) (i32.const 65536)))
      (then (drop (memory.grow (i32.add (i32.shr_u (local.get $n_bytes) (i32.const 16)) (i32.const 1))))))
    (local.get $at))
