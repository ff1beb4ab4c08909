;; Describes a version without a patch number.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 76) (i32.const 3)))
  (func $odd (param i32))
)
