;; Describes a list of inputs that exceeds the memory.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 120) (i32.const 2048))
    (i32.store (i32.const 124) (i32.const 100000000)))
  (func $odd (param i32))
)
