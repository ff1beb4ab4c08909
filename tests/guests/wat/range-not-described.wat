;; Describes a range other than the one that it exports.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (f64.store (i32.const 112) (f64.const 2)))
  (func $odd (param i32))
)
