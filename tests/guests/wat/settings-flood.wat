;; Describes a setting whose key has 100 MB.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (drop (memory.grow (i32.const 1600)))
    (i32.store (i32.const 88) (i32.const 2048))
    (i32.store (i32.const 92) (i32.const 1))
    (i32.store (i32.const 2048) (i32.const 65536))
    (i32.store (i32.const 2052) (i32.const 100000000)))
  (func $odd (param i32))
)
