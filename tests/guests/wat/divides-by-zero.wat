;; Divides by zero.
(module
  ;;! include reward

  (func $odd (param $zero i32)
    (i32.store (i32.const 512) (i32.div_u (i32.const 1) (i32.load (i32.const 700)))))
)
