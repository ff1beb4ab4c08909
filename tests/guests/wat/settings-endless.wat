;; Describes a list of settings that exceeds the memory.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 88) (i32.const 65536))
    (i32.store (i32.const 92) (i32.const 100000000)))
  (func $odd (param i32))
)
