;; Describes a range with NaN.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (f64.store (i32.const 112) (f64.const nan)))
  (func $odd (param i32))
)
