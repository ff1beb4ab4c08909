;; Returns 10,000 components whose names are all the same text of 1 MiB in memory: 2 MB in the guest become 10 GB in the host.
(module
  ;;! include reward

  (func $odd (param $result i32)
    (local $at i32) (local $end i32)
    (drop (memory.grow (i32.const 32)))
    (memory.fill (i32.const 0x20000) (i32.const 120) (i32.const 0x100000))
    (local.set $at (i32.const 0x130000))
    (local.set $end (i32.add (local.get $at) (i32.const 160000)))
    (i32.store offset=16 (local.get $result) (local.get $at))
    (i32.store offset=20 (local.get $result) (i32.const 10000))
    (loop $next
      (i32.store (local.get $at) (i32.const 0x20000))
      (i32.store offset=4 (local.get $at) (i32.const 0x100000))
      (f64.store offset=8 (local.get $at) (f64.const 1))
      (local.set $at (i32.add (local.get $at) (i32.const 16)))
      (br_if $next (i32.lt_u (local.get $at) (local.get $end)))))
)
