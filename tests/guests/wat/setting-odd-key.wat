;; Describes a setting whose key contains dots.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 88) (i32.const 2048))
    (i32.store (i32.const 92) (i32.const 1))
    (i32.store (i32.const 2048) (i32.const 1280))
    (i32.store (i32.const 2052) (i32.const 5)))
  (func $odd (param i32))
)
