;; Describes a number with a NaN minimum.
;;! contract 0.2.0
(module
  ;;! include reward
  (data (i32.const 1400) "depth")
  (func $describe_odd
    (i32.store (i32.const 88) (i32.const 2048))
    (i32.store (i32.const 92) (i32.const 1))
    (i32.store (i32.const 2048) (i32.const 1400))
    (i32.store (i32.const 2052) (i32.const 5))
    (i32.store (i32.const 2056) (i32.const 1))
    (i32.store (i32.const 2080) (i32.const 1))
    (f64.store (i32.const 2088) (f64.const nan)))
  (func $odd (param i32))
)
