;; Describes its kind twice.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 84) (i32.const 2))
    (i32.store (i32.const 332) (i32.const 2)))
  (func $odd (param i32))
)
