package penstock

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.analysis.TypeCheckResult
import org.apache.spark.sql.catalyst.analysis.TypeCheckResult.{TypeCheckFailure, TypeCheckSuccess}
import org.apache.spark.sql.catalyst.expressions.{Expression, UnaryExpression}
import org.apache.spark.sql.catalyst.expressions.codegen.{CodegenContext, ExprCode, FalseLiteral}
import org.apache.spark.sql.catalyst.expressions.codegen.Block.BlockHelper
import org.apache.spark.sql.types.{DataType, LongType}

/** `penstock_moment(millis)`: a BIGINT, never null, that is the same for a whole batch, and another one in the next batch.
  *
  * Spark writes such a number into the code that it generates. So each batch has a code of its own, which is compiled for some
  * hundred rows. Here the number is beside the code, and the code of the first batch serves all others.
  */
case class Moment(child: Expression) extends UnaryExpression {
  override def prettyName: String = "penstock_moment"
  override def dataType: DataType = LongType
  override def nullable: Boolean = false
  override def foldable: Boolean = false // else the optimizer makes a literal of it again
  override def checkInputDataTypes(): TypeCheckResult =
    if (child.dataType == LongType) TypeCheckSuccess else TypeCheckFailure(s"$prettyName takes a BIGINT")

  override def eval(row: InternalRow): Any = child.eval(row)
  override protected def doGenCode(context: CodegenContext, code: ExprCode): ExprCode = {
    val millis = context.addReferenceObj("millis", Long.box(child.eval().asInstanceOf[Long]))
    code.copy(code = code"final long ${code.value} = $millis.longValue();", isNull = FalseLiteral)
  }
  override protected def withNewChildInternal(child: Expression): Expression = copy(child = child)
}
